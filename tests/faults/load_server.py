"""Load a server with good, broken and hostile clients, and check that it answers right, leaks nothing and stays small.

    python tests/faults/load_server.py --seconds 600
    python tests/faults/load_server.py --seconds 600 --kills 30

Good clients complete texts, chat, and use sessions; their answers must equal a quiet server's. The others leave in the
middle of a stream, flood, and send malformed JSON, schemas and huge bodies. At the end no job may be left, the log may
have no traceback, and the memory may not have grown since the first third.

With `--kills`, the server is killed with SIGKILL and started again meanwhile: every turn that a client has an answer
for must be there, and no session may have another's text.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM

import hf_recurrent
from hf_recurrent.cli import serve

GROWTH = 48 << 20  # bytes of memory, of fragmentation
_TEXTS = [f"Text number {number}, " * (1 + number % 5) for number in range(8)]


_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"], "additionalProperties": False}
_MALFORMED = {
    "/v1/completions": {"model": "tiny", "prompt": "text", "temperature": 1.0, "n": 2},
    "/v1/chat/completions": {
        "model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    },
    "/v1/responses": {
        "model": "tiny", "input": "a", "max_output_tokens": 9, "tool_choice": "required",
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
    },
    "/v1/sessions": {}, "/v1/sessions/x/read": {"text": "a"}, "/v1/sessions/from_state": {"a": "b"},
}  # fmt: skip


class Load:
    """Clients of one server.

    Args:
        port: of the server.
        seed: of their actions.
    """

    def __init__(self, port: int, seed: int):
        self.port, self.seed, self.is_over = port, seed, False
        self.counts: Counter[str] = Counter()
        self.lasting_texts: dict[int, dict] = {}
        self.faults: list[str] = []
        self.expected = [self.completion(number) for number in range(len(_TEXTS))]

    def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, **body) -> tuple[int, dict]:
        status, data = self.request("POST", path, json.dumps(body).encode())
        return status, json.loads(data)

    def completion(self, number: int) -> str:
        status, found = self.post("/v1/completions", model="tiny", prompt=_TEXTS[number], max_tokens=40, seed=number)
        return found["choices"][0]["text"] if status == 200 else f"status {status}"

    # ---- Clients

    def good_completion(self, chance: random.Random) -> None:
        number = chance.randrange(len(_TEXTS))
        found = self.completion(number)
        if found not in (self.expected[number], "status 429"):
            self.faults.append(f"completion {number} is {found!r}, alone {self.expected[number]!r}")

    def good_session(self, chance: random.Random) -> None:
        number = chance.randrange(len(_TEXTS))
        status, session = self.post("/v1/sessions")
        if status != 200:
            return
        path = f"/v1/sessions/{session['id']}"
        text = _TEXTS[number].encode()
        cut = chance.randrange(1, len(text))
        for part in (text[:cut], text[cut:]):
            self.post(f"{path}/read", text=part.decode())
        status, fork = self.post(f"{path}/fork")
        if status == 200:
            status, found = self.post(f"/v1/sessions/{fork['id']}/generate", max_tokens=40, seed=number)
            if status == 200 and found["text"] != self.expected[number]:
                self.faults.append(f"session {number} gives {found['text']!r}, alone {self.expected[number]!r}")
            self.request("DELETE", f"/v1/sessions/{fork['id']}")
        self.request("DELETE", path)

    def good_chat(self, chance: random.Random) -> None:
        """Two turns of stored responses, and an answer in a form."""
        body = {"model": "tiny", "max_output_tokens": 8, "seed": 1}
        status, first = self.post("/v1/responses", **body, input=chance.choice(_TEXTS))
        if status != 200:
            return
        status, second = self.post("/v1/responses", **body, input="And?", previous_response_id=first["id"])
        if status == 200 and second["usage"]["input_tokens_details"]["cached_tokens"] < first["usage"]["input_tokens"]:
            self.faults.append(f"the second turn read the first one again: {second['usage']}")
        elif status not in (200, 429):
            self.faults.append(f"the second turn gives {status}: {second}")
        form = _MALFORMED["/v1/chat/completions"] | {"max_tokens": 40, "seed": chance.randrange(99)}
        status, found = self.post("/v1/chat/completions", **form)
        if status == 200 and found["choices"][0]["message"]["content"] not in ('{"a": "x"}', '{"a": 1}'):
            self.faults.append(f"an answer in a form is {found['choices'][0]}")

    def lasting(self, chance: random.Random) -> None:
        """A step of a session that outlives the process: nothing that was acknowledged is lost, nothing is mixed."""
        kept = self.lasting_texts.setdefault(threading.get_ident(), {"id": None, "text": ""})
        if kept["id"] is None:
            status, session = self.post("/v1/sessions")
            kept["id"] = session["id"] if status == 200 else None
            return
        path, piece = f"/v1/sessions/{kept['id']}", f"{threading.get_ident()} {chance.random()}, "
        status, about = self.request("GET", path)
        if status == 429:
            return
        if status != 200:
            self.faults.append(f"an acknowledged session gives {status}")
            kept["id"] = None
            return
        read = json.loads(about)["bytes_read"]
        if read == len(kept["text"] + kept.get("sent", "")):  # the answer to the last piece was cut
            kept["text"] += kept.get("sent", "")
        if read != len(kept["text"]):
            self.faults.append(f"{len(kept['text'])} bytes were acknowledged; the session has {read}")
            kept["text"] = kept["text"][:read]
        kept["sent"] = piece
        status, _ = self.post(f"{path}/read", text=piece, bits=False)
        if status == 200:
            kept["text"] += piece
        kept["sent"] = ""
        if chance.random() < 0.3:
            self.compare(path, kept["text"])

    def compare(self, path: str, text: str) -> None:
        """The state of a session belongs to its text."""
        status, fork = self.post(f"{path}/fork")
        if status != 200:
            return
        status, found = self.post(f"/v1/sessions/{fork['id']}/generate", max_tokens=10, seed=1)
        other, alone = self.post("/v1/completions", model="tiny", prompt=text, max_tokens=10, seed=1)
        if status == other == 200 and found["text"] != alone["choices"][0]["text"]:
            self.faults.append("a session has a state of another text")
        self.request("DELETE", f"/v1/sessions/{fork['id']}")

    def leaving(self, chance: random.Random) -> None:
        body = {"model": "tiny", "prompt": "a" * chance.randrange(1, 3000), "max_tokens": 5000}
        data = json.dumps(body | {"stream": chance.random() < 0.7}).encode()
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            whole = head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data
            connection.sendall(whole[: chance.choice([len(whole), chance.randrange(len(whole))])])
            if chance.random() < 0.5:
                connection.settimeout(0.2)
                with suppress(TimeoutError):
                    connection.recv(chance.randrange(1, 2000))

    def flood(self, chance: random.Random) -> None:
        connections = [socket.create_connection(("127.0.0.1", self.port), timeout=60) for _ in range(20)]
        for connection in connections:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * chance.randrange(1, 20))
        for connection in connections:
            connection.close()

    def malformed(self, chance: random.Random) -> None:
        path = chance.choice([*_MALFORMED])
        body = bytearray(json.dumps(_MALFORMED[path]).encode())
        for _ in range(chance.randrange(1, 4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        status, answer = self.request("POST", path, bytes(body))
        if status != 200 and (status >= 500 or "error" not in json.loads(answer)):
            self.faults.append(f"{path} with {bytes(body)!r} gives {status}: {answer[:200]!r}")

    def huge(self, chance: random.Random) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(b"POST /v1/sessions/from_state HTTP/1.1\r\nHost: localhost\r\n")
            connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
            with suppress(OSError):
                for _ in range(chance.randrange(100)):
                    connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")

    def run(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        kinds = [self.good_completion] * 4 + [self.good_session] * 3 + [self.leaving] * 2
        kinds += [self.good_chat, self.lasting, self.lasting]
        kinds += [self.flood, self.malformed, self.malformed, self.huge]
        while not self.is_over:
            kind = chance.choice(kinds)
            try:
                kind(chance)
            except (ConnectionError, http.client.HTTPException):
                time.sleep(0.02)
                self.counts["connections refused or cut"] += 1
            except Exception as error:
                self.faults.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            self.counts[kind.__name__] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0, help="of the server, spread over the time")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()

    def run(server: Server) -> list[str]:
        load = Load(server.start(), arguments.seed)
        found = _run(load, server, arguments)
        counts.update(load.counts)
        return found

    faults = faults_of(run)
    print_findings(faults, counts)
    print(f"{sum(counts.values())} actions, {len(faults)} faults")
    return bool(faults)


def faults_of(run: Callable[["Server"], list[str]]) -> list[str]:
    """Run clients, which start the server of a tiny model; returns their faults, a traceback in its log first."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "tiny"), Path(folder, "log")
        save_tiny_model(path)
        server = Server(path, log)
        try:
            faults = run(server)
            server.process.terminate()
            server.process.join(60)
        finally:
            server.kill()
        text = log.read_text()
    return [f"the log of the server has a traceback:\n{text[:3000]}"] * ("Traceback" in text) + faults


def print_findings(faults: list[str], counts: Counter[str]) -> None:
    """The first faults, and what the clients did."""
    for fault in faults[:20]:
        print(fault)
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))


def save_tiny_model(path: Path) -> None:
    """A checkpoint with new weights and a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "state_size": 32}
    AutoModelForCausalLM.from_config(hf_recurrent.config_from_preset("memora-tiny", **sizes)).save_pretrained(path)
    hf_recurrent.ByteTokenizer(chat_template=hf_recurrent.CHAT_TEMPLATE).save_pretrained(path)


class Server:
    """The server, which may be killed and started again at the same port."""

    def __init__(self, path: Path, log: Path):
        self._path, self._log, self._port = path, log, 0

    def start(self) -> int:
        """Start; returns the port."""
        self._log.touch()
        begin = self._log.stat().st_size
        # A child, so that the imports are made once.
        self.process = multiprocessing.get_context("fork").Process(target=self._serve)
        self.process.start()
        while "is served on" not in (text := self._log.read_bytes()[begin:].decode()):
            assert self.process.is_alive(), text
            time.sleep(0.05)
        self._port = int(text.split("is served on", 1)[1].split("/v1")[0].rsplit(":", 1)[1])
        return self._port

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.join()

    def _serve(self) -> None:
        with self._log.open("a", buffering=1) as sys.stderr:
            folder = os.fspath(self._path.parent / "sessions")
            serve.main([os.fspath(self._path), "--port", str(self._port), "--session_dir", folder, "--threads", "1"])


def _run(load: Load, server: Server, arguments: argparse.Namespace) -> list[str]:
    threads = [threading.Thread(target=load.run, args=(number,)) for number in range(arguments.clients)]
    for thread in threads:
        thread.start()
    for _ in range(arguments.kills):
        time.sleep(arguments.seconds / (2 * arguments.kills))
        server.kill()
        server.start()
    seconds = arguments.seconds / (2 if arguments.kills else 1)
    process, sizes, end = psutil.Process(server.process.pid), [], time.monotonic() + seconds
    while time.monotonic() < end and server.process.is_alive():
        sizes.append(process.memory_info().rss)
        time.sleep(min(0.5, seconds / 10))
    load.is_over = True
    for thread in threads:
        thread.join()
    faults = load.faults
    if not server.process.is_alive():
        return [*faults, f"the server has ended with status {server.process.exitcode}"]
    for kept in load.lasting_texts.values():
        if kept["id"] is not None and not kept.get("sent"):
            load.compare(f"/v1/sessions/{kept['id']}", kept["text"])
    begin = max(sizes[: len(sizes) // 3 + 1])
    print(f"memory: {begin / 2**20:.0f} MiB in the first third, {max(sizes) / 2**20:.0f} MiB at most")
    if max(sizes) > begin + GROWTH:
        faults.append("the memory has grown")
    names = ("hf_recurrent_generating_jobs", "hf_recurrent_reading_jobs", "hf_recurrent_waiting_jobs")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        lines = [line.split() for line in load.request("GET", "/metrics")[1].decode().splitlines()]
        left = {line[0]: float(line[1]) for line in lines if line[0] in names}
        if not any(left.values()):
            break
        time.sleep(0.2)
    else:
        faults.append(f"jobs are left: {left}")
    faults += [f"alone, completion {n} gives other bytes" for n in range(8) if load.completion(n) != load.expected[n]]
    return faults


if __name__ == "__main__":
    sys.exit(main())
