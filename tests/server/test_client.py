"""The Python client of sessions."""

import sys
import threading
from subprocess import run

import pytest
from running_server import running_server

from hf_recurrent import ServerError, SessionClient


@pytest.fixture(scope="module")
def server():
    with running_server(api_key="key", hosts=None, max_new_tokens=10**6) as found:
        yield found


@pytest.fixture
def client(server):
    return SessionClient(f"http://127.0.0.1:{server.port}/v1/", "key")


def test_sessions_are_read_forked_rewound_and_moved(client):
    session = client.create()
    assert session.read("It was ", bits=True)["bits"][0] is None and session.read(b"\xffdark")["bytes_read"] == 12
    session.mark("here")
    fork, first = session.fork(), session.generate(20, seed=1)
    assert fork.generate(20, seed=1) == first and session.about()["bytes_read"] == 32
    session.rewind("here")
    moved = client.from_state(session.state())
    assert b"".join(session.stream(20, seed=1)) == first == moved.generate(20, seed=1)
    assert client.session(session.id).about()["marks"] == {"here": 12}
    session.delete()
    with pytest.raises(ServerError, match="404") as caught:
        session.about()
    assert caught.value.code == "session_not_found"


def test_a_closed_stream_stops_the_generation(server, client):
    server.scheduler.end_tokens = frozenset()
    session = client.create()
    stream = session.stream(10**6, seed=1)
    assert next(stream)
    with pytest.raises(ServerError, match="busy"):
        session.generate()
    stream.close()
    while server.scheduler.counts.generating:
        pass
    assert session.generate(3) and session.stop() is False


def test_a_connection_that_the_server_has_closed_is_opened_again():
    with running_server() as first:
        client = SessionClient(f"http://127.0.0.1:{first.port}")
        session = client.create()
        port, kept = first.port, client._threads.connection
        kept.request("GET", "/health", headers={"connection": "close"})
        kept.getresponse().read()
        assert session.about()["bytes_read"] == 0 and client._port == port


def test_threads_have_connections_of_their_own(client):
    expected, found = client.create(), []
    expected.read("abc")
    text = expected.generate(30, seed=2)

    def work() -> None:
        for _ in range(5):
            session = client.create()
            session.read("abc")
            found.append(session.generate(30, seed=2))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [text] * 30


def test_wrong_keys_and_addresses(server):
    with pytest.raises(ServerError, match="401"):
        SessionClient(f"http://127.0.0.1:{server.port}", "wrong").create()
    with pytest.raises(OSError):
        SessionClient("http://127.0.0.1:1").create()
    for address in ("127.0.0.1:8000", "ftp://host", ""):
        with pytest.raises(ValueError, match="`address` is"):
            SessionClient(address)


def test_the_client_needs_no_torch():
    program = "import sys, hf_recurrent; hf_recurrent.SessionClient; print('torch' in sys.modules)"
    assert run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"
