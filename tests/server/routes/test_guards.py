"""Strangers: wrong keys and hosts, bodies that are too large, slow, malformed or hostile, clients that leave."""

import json
import socket
import time

import pytest
from running_server import Client, running_server

from hf_recurrent.server.routes.app import TimedProtocol, listen

HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server():
    with running_server(max_body=5000, body_seconds=0.4) as client:
        yield client


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(20)
    return connection


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"1", b'"a"', b"\xff\xfe", b"[" * 4000, b'{"model": NaN}', b'{"model": "tiny"} x',
     b'{"model": "tiny", "temperature": Infinity}', b'{"model": "tiny", "temperature": NaN}', b'{"model": 1}',
     b'{"model": "tiny", "prompt": {"a": 1}}', b'{"model": "tiny", "prompt": [1, "a"]}',
     b'{"model": "tiny", "n": true}',
     b'{"model": "tiny", "prompt": "\\ud800"}', b'{"model": "tiny", "stream": "yes"}',
     b'{"model": "tiny", "prompt": null}',
     b'{"model": "tiny", "max_tokens": 1' + b"0" * 4000 + b"}", b'{"model": "tiny", "seed": 1e400}',
     b'{"model": "tiny", "prompt": [-1]}', b'{"model": "tiny", "prompt": [1' + b"0" * 30 + b"]}"],
)  # fmt: skip
def test_malformed_bodies(server, body):
    reply = server.request("POST", "/v1/completions", body)
    assert reply.status == 400 and reply.error()


def test_forms_of_other_sites_are_not_read(server):
    """A page of another site may send these without asking the browser first."""
    body = json.dumps({"model": "tiny", "prompt": "a"}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        reply = server.request("POST", "/v1/completions", body, {"content-type": kind})
        assert reply.status == 400 and reply.error() == f"The header `Content-Type` is '{kind}'; " + (
            "it must be 'application/json'."
        )
    with connect(server.port) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert b"The header `Content-Type` is missing; it must be 'application/json'." in received(connection)
    reply = server.request("GET", "/v1/models", headers={"host": "evil.example"})
    assert reply.status == 403 and "Host" in reply.error()
    assert server.request("GET", "/v1/models", headers={"host": f"localhost:{server.port}"}).status == 200


@pytest.mark.parametrize(
    "path",
    ["/v1/sessions/../../etc/passwd", "/v1/sessions/..%2F..%2Fetc%2Fpasswd", "/v1/sessions/%00", "/v1/sessions/%ff",
     "/v1/sessions/' or 1=1 --/state".replace(" ", "%20"), "/v1/sessions/sess_" + "x" * 3000,
     "/v1/models/..%2f..", "//", "/v1"],
)  # fmt: skip
def test_no_path_is_opened(server, path):
    reply = server.request("GET", path)
    assert reply.status == 404 and reply.error()


def test_large_bodies_are_refused_before_they_are_read(server):
    with connect(server.port) as connection:
        connection.sendall(HEADERS + b"Content-Length: 1000000000000\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 413 ")
    with connect(server.port) as connection:  # without its length
        connection.sendall(HEADERS + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(1000):
                connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
        except OSError:
            pass
        assert received(connection)[:13] in (b"HTTP/1.1 413 ", b"")
    # Also while the client still sends, which reads no answer before the end.
    for size in (5001, 5_000_000):
        reply = server.request("POST", "/v1/completions", b"x" * size)
        assert reply.status == 413 and "reads at most 5000 bytes" in reply.error()
    assert server.request("POST", "/v1/completions", b"x" * 5000).status == 400


def test_responses_are_sent_without_delay():
    """Connections inherit the option of the listener."""
    with listen("127.0.0.1", 0) as listener, connect(listener.getsockname()[1]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_slow_clients_are_cut_off(server, monkeypatch):
    with connect(server.port) as connection:
        connection.sendall(HEADERS + b"Content-Length: 100\r\n\r\n{")
        assert received(connection).startswith(b"HTTP/1.1 408 ")
    monkeypatch.setattr(TimedProtocol, "header_seconds", 0.2)
    for beginning in (b"", HEADERS):
        with connect(server.port) as connection:
            connection.sendall(beginning)
            assert received(connection) == b""


def test_a_client_that_takes_nothing_delays_nobody(monkeypatch):
    monkeypatch.setattr(TimedProtocol, "send_seconds", 0.3)
    with running_server(pieces_per_second=1e6) as server:
        server.scheduler.end_tokens = frozenset()
        body = json.dumps(
            {"model": "tiny", "prompt": "a", "max_tokens": 3000, "logprobs": 20, "stream": True}
        ).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(HEADERS + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            for _ in range(3):
                assert server.complete(prompt="b", max_tokens=5, seed=1)["usage"]["completion_tokens"] == 5
            while server.scheduler.counts.generating:
                time.sleep(0.02)
            time.sleep(0.5)  # longer than it may take nothing
            connection.settimeout(20)
            assert b"[DONE]" not in received(connection)


def test_a_client_that_leaves_ends_its_generation():
    with running_server() as server:
        server.scheduler.end_tokens = frozenset()
        for stream in (True, False):
            body = {"model": "tiny", "prompt": "a", "max_tokens": 60_000, "stream": stream}
            data = json.dumps(body).encode()
            with connect(server.port) as connection:
                connection.sendall(HEADERS + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
                while not server.scheduler.counts.generating:
                    time.sleep(0.005)
            begin = time.monotonic()
            while server.scheduler.counts.generating:
                time.sleep(0.005)
                assert time.monotonic() < begin + 20
        assert server.scheduler.counts.bytes_generated < 60_000


def test_keys(caplog):
    with running_server(api_key="secret-key", hosts=None) as server:
        assert server.request("GET", "/health").status == 200
        for key in (
            None,
            "",
            "Bearer",
            "Bearer ",
            "Bearer wrong",
            "Bearer secret-ke",
            "Basic secret-key",
            "Bearer \xe9",
        ):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere"):
                reply = server.request("GET", path, headers={} if key is None else {"authorization": key})
                assert reply.status == 401 and "secret" not in reply.error()
        assert Client(server.port, headers={"authorization": "Bearer secret-key"}).get("/v1/models")["data"]
        assert (
            Client(server.port, headers={"authorization": "Bearer secret-key"}).request("GET", "/metrics").status
            == 200
        )
    assert "secret-key" not in caplog.text


def test_one_session_never_sees_another():
    """Side by side, sessions give what they give alone; forgotten ones leave nothing."""
    with running_server() as server:
        texts = {server.new_session(): f"The secret of number {number} is {number * 7919}." for number in range(12)}
        for session, text in texts.items():
            server.read(session, text)
        together = {session: server.generate(session, max_tokens=20, seed=1) for session in texts}
    for session, text in list(texts.items())[:3]:
        with running_server() as server:
            alone = server.new_session()
            server.read(alone, text)
            assert server.generate(alone, max_tokens=20, seed=1) == together[session]
            empty = server.new_session()
            assert server.get(f"/v1/sessions/{empty}")["bytes_read"] == 0


def test_metrics():
    with running_server() as server:
        session = server.new_session()
        server.read(session, "12345")
        server.complete(prompt="abc", max_tokens=4, seed=0)
        server.request("GET", "/v1/sessions/unknown")
        text = server.request("GET", "/metrics").body.decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["hf_recurrent_bytes_read_total"]) == 8
    assert float(lines["hf_recurrent_bytes_generated_total"]) == 4
    assert float(lines["hf_recurrent_sessions"]) == 1
    assert (
        float(lines['hf_recurrent_responses_total{method="GET",path="/v1/sessions/{session_id}",status="404"}']) == 1
    )
    assert session not in text
