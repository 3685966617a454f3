"""Send hostile requests to a server that has thousands of open sessions: nothing may crash, grow or be mixed up.

    python tests/faults/hostile_server.py --sessions 10000 --requests 1000

Every session has read a text of its own. Hostile requests have wrong sizes, types and encodings, slow bodies, and
bytes that are no HTTP. Each one has to get an error in OpenAI's form, or a closed connection. Afterwards, a sample of
the sessions has to continue its text as a new completion of the same text does.
"""

import argparse
import http.client
import json
import multiprocessing.pool
import random
import socket
import sys
import threading
import time
from collections import Counter

import psutil
from load_server import GROWTH, Server, faults_of, print_findings

_THREADS = 8
_JSON = {"content-type": "application/json"}
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/sessions",
    "/v1/sessions/from_state",
    "/v1/sessions/x/read",
)
_BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": "text", "max_tokens": 2},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "a", "max_output_tokens": 2},
}
_VALUES = (
    None,
    True,
    -1,
    10**30,
    1e308,
    "",
    "\ud800",
    "\0",
    [],
    [[]],
    {},
    {"a": []},
    [None],
    "a" * 70_000,
    [1] * 9000,
)
_RAW = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"GET /health\r\n\r\n",
    b"GET " + b"/a" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/sessions/\xff\x00/read HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
)


class Hostility:
    """Requests to one server.

    Args:
        port: of the server.
        seed: of their kinds.
    """

    def __init__(self, port: int, seed: int):
        self.port, self.seed, self.faults = port, seed, []
        self.counts: Counter[str] = Counter()
        self.local = threading.local()

    def request(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        """On the kept-alive connection of this thread."""
        if getattr(self.local, "connection", None) is None:
            self.local.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            self.local.connection.request(method, path, body, headers)
            response = self.local.connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            self.local.connection = None
            raise

    def post(self, path: str, body: dict) -> dict:
        for _ in range(3):  # an idle connection may have been closed
            try:
                status, data = self.request("POST", path, json.dumps(body).encode(), _JSON)
            except (OSError, http.client.HTTPException):
                continue
            assert status == 200, data
            return json.loads(data)
        raise ConnectionError(path)

    def open(self, number: int) -> str:
        """A session that has read its own text."""
        session = self.post("/v1/sessions", {})["id"]
        self.post(f"/v1/sessions/{session}/read", {"text": text_of(number), "bits": False})
        return session

    def compare(self, pair: tuple[int, str]) -> None:
        number, session = pair
        found = self.post(f"/v1/sessions/{session}/generate", {"max_tokens": 12, "temperature": 0})["text"]
        body = {"model": "tiny", "prompt": text_of(number), "max_tokens": 12, "temperature": 0}
        alone = self.post("/v1/completions", body)["choices"][0]["text"]
        if found != alone:
            self.faults.append(f"session {number} continues with {found!r}, alone {alone!r}")

    def attack(self, number: int) -> None:
        """One hostile request."""
        chance = random.Random(f"{self.seed} {number}")
        kind = chance.choice(
            [self.wrong_type, self.wrong_bytes, self.wrong_encoding, self.no_http, self.slow, self.odd]
        )
        try:
            kind(chance)
            self.counts[kind.__name__] += 1
        except (OSError, http.client.HTTPException):
            self.counts[f"{kind.__name__}, connection closed"] += 1
        except Exception as error:
            self.faults.append(f"{kind.__name__} {number}: {type(error).__name__}: {error}")

    def check(self, status: int, data: bytes, sent: object) -> None:
        """An answer is a result, or an error in OpenAI's form that is not the server's fault."""
        if status >= 500 and status != 503:
            self.faults.append(f"{str(sent)[:200]} gives {status}: {data[:200]!r}")
        elif status >= 400 and json.loads(data)["error"].keys() != {"message", "type", "param", "code"}:
            self.faults.append(f"{str(sent)[:200]} gives {data[:200]!r}")

    def wrong_type(self, chance: random.Random) -> None:
        path = chance.choice([*_BODIES])
        field = chance.choice([*_BODIES[path], "temperature", "stop", "n", "logprobs", "stream", "logit_bias", "seed"])
        body = json.dumps(_BODIES[path] | {field: chance.choice(_VALUES)}).encode()
        self.check(*self.request("POST", path, body, _JSON), body)

    def wrong_bytes(self, chance: random.Random) -> None:
        path, size = chance.choice(_PATHS), chance.choice([0, 1, 100, 60_000, 5_000_000])
        deep = b"[" * size if chance.random() < 0.3 else chance.randbytes(size)
        self.check(*self.request("POST", path, deep, _JSON), (path, size))

    def wrong_encoding(self, chance: random.Random) -> None:
        text, kinds = json.dumps(_BODIES["/v1/completions"]), ("utf-16", "utf-32", "utf-8-sig", "cp037", "utf-7")
        kind = chance.choice(kinds)
        headers = {"content-type": f"application/json; charset={kind}"}
        if chance.random() < 0.5:
            headers = {"content-type": chance.choice(["text/plain", "", "multipart/form-data", "application/json"])}
            headers["content-encoding"] = chance.choice(["gzip", "br", "identity"])
        self.check(*self.request("POST", "/v1/completions", text.encode(kind), headers), (kind, headers))

    def odd(self, chance: random.Random) -> None:
        ids = ("../../etc/passwd", "%00", "sess_" + "a" * 3000, "%ff", "x/y", "sess_x?after=%00&limit=-1")
        method = chance.choice(["GET", "POST", "PATCH", "DELETE", "PUT", "OPTIONS", "TRACE"])
        path = f"/v1/sessions/{chance.choice(ids)}{chance.choice(['', '/fork', '/state', '/marks/a', '/rewind'])}"
        self.check(*self.request(method, path, b"{}", _JSON), (method, path))

    def no_http(self, chance: random.Random) -> None:
        data = chance.choice(_RAW) if chance.random() < 0.8 else chance.randbytes(chance.randrange(1, 3000))
        with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
            connection.sendall(data)
            answer = connection.recv(100)
        if answer[9:12] in (b"500", b"502"):
            self.faults.append(f"{data[:100]!r} gives {answer!r}")

    def slow(self, chance: random.Random) -> None:
        """A body that comes in pieces, and whose end may never come."""
        body = json.dumps(_BODIES["/v1/completions"]).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            for begin in range(0, len(body) - chance.choice([0, 0, 5]), 7):
                connection.sendall(body[begin : begin + 7])
                time.sleep(chance.choice([0, 0.02, 0.1]))
            connection.settimeout(1.0)
            answer = connection.recv(1000)
        if b" 200 " not in answer[:20] and b" 429 " not in answer[:20]:
            self.faults.append(f"a slow body gives {answer[:100]!r}")


def text_of(number: int) -> str:
    """The text of a session."""
    return f"This is the text of session {number}, {number * number}. "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--compared", type=int, default=500, help="sessions that are continued at the end")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()

    def run(server: Server) -> list[str]:
        hostility = Hostility(server.start(), arguments.seed)
        _run(hostility, psutil.Process(server.process.pid), arguments)
        counts.update(hostility.counts)
        return ["the server has ended"] * (not server.process.is_alive()) + hostility.faults

    faults = faults_of(run)
    print_findings(faults, counts)
    print(f"{arguments.sessions} sessions, {arguments.requests} hostile requests, {len(faults)} faults")
    return bool(faults)


def _run(hostility: Hostility, process: psutil.Process, arguments: argparse.Namespace) -> None:
    def memory(stage: str) -> int:
        size = process.memory_info().rss
        print(f"memory {stage}: {size / 2**20:.0f} MiB", flush=True)
        return size

    with multiprocessing.pool.ThreadPool(_THREADS) as pool:
        memory("at the start")
        sessions = pool.map(hostility.open, range(arguments.sessions))
        memory("with all sessions")
        third = arguments.requests // 3
        pool.map(hostility.attack, range(third), chunksize=1)
        before = memory("after a third of the hostile requests")
        pool.map(hostility.attack, range(third, arguments.requests), chunksize=1)
        after = memory("after all of them")
        if after > before + GROWTH:
            hostility.faults.append("the memory has grown")
        chosen = random.Random(arguments.seed).sample([*enumerate(sessions)], min(arguments.compared, len(sessions)))
        pool.map(hostility.compare, chosen)


if __name__ == "__main__":
    sys.exit(main())
