"""Load a server with good, broken and hostile clients, and check that it answers right, leaks nothing and stays small.

    python tests/faults/load_server.py --seconds 600

Good clients complete texts and use sessions; their answers must equal a quiet server's. The others leave in the
middle of a stream, flood, and send malformed JSON and huge bodies. At the end no job may be left, the log may have no
traceback, and the memory may not have grown since the first third.
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
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM

import hf_recurrent
from hf_recurrent.cli import serve

_GROWTH = 48 << 20  # bytes of memory, of fragmentation
_TEXTS = [f"Text number {number}, " * (1 + number % 5) for number in range(8)]


class Load:
    """Clients of one server.

    Args:
        port: of the server.
        seed: of their actions.
    """

    def __init__(self, port: int, seed: int):
        self.port, self.seed, self.is_over = port, seed, False
        self.counts: Counter[str] = Counter()
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
        body = bytearray(json.dumps({"model": "tiny", "prompt": "text", "temperature": 1.0, "n": 2}).encode())
        for _ in range(chance.randrange(1, 4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        paths = ["/v1/completions", "/v1/sessions", "/v1/sessions/x/read", "/v1/sessions/from_state"]
        path = chance.choice(paths)
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
        kinds += [self.flood, self.malformed, self.malformed, self.huge]
        while not self.is_over:
            kind = chance.choice(kinds)
            try:
                kind(chance)
            except (ConnectionError, http.client.HTTPException):
                self.counts["connections refused or cut"] += 1
            except Exception as error:
                self.faults.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            self.counts[kind.__name__] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tiny")
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "state_size": 32}
        AutoModelForCausalLM.from_config(hf_recurrent.config_from_preset("memora-tiny", **sizes)).save_pretrained(path)
        hf_recurrent.ByteTokenizer().save_pretrained(path)
        log = Path(folder, "log")
        log.touch()
        # A child, so that the imports are made once.
        server = multiprocessing.get_context("fork").Process(target=_serve, args=(path, log))
        server.start()
        try:
            while "is served on" not in (text := log.read_text()):
                assert server.is_alive(), text
                time.sleep(0.05)
            load = Load(int(text.split("is served on", 1)[1].split("/v1")[0].rsplit(":", 1)[1]), arguments.seed)
            faults = _run(load, server, arguments)
            server.terminate()
            server.join(60)
        finally:
            server.kill()
            server.join()
        text = log.read_text()
        if "Traceback" in text:
            faults.insert(0, f"the log of the server has a traceback:\n{text[:3000]}")
    for fault in faults[:20]:
        print(fault)
    print(", ".join(f"{count} {name}" for name, count in sorted(load.counts.items())))
    print(f"{sum(load.counts.values())} actions, {len(faults)} faults")
    return bool(faults)


def _serve(path: Path, log: Path) -> None:
    with log.open("w", buffering=1) as sys.stderr:
        folder = os.fspath(path.parent / "sessions")
        serve.main([os.fspath(path), "--port", "0", "--session_dir", folder, "--threads", "1"])


def _run(load: Load, server: multiprocessing.Process, arguments: argparse.Namespace) -> list[str]:
    threads = [threading.Thread(target=load.run, args=(number,)) for number in range(arguments.clients)]
    for thread in threads:
        thread.start()
    process, sizes, end = psutil.Process(server.pid), [], time.monotonic() + arguments.seconds
    while time.monotonic() < end and server.is_alive():
        sizes.append(process.memory_info().rss)
        time.sleep(min(0.5, arguments.seconds / 10))
    load.is_over = True
    for thread in threads:
        thread.join()
    faults = load.faults
    if not server.is_alive():
        return [*faults, f"the server has ended with status {server.exitcode}"]
    begin = max(sizes[: len(sizes) // 3 + 1])
    print(f"memory: {begin / 2**20:.0f} MiB in the first third, {max(sizes) / 2**20:.0f} MiB at most")
    if max(sizes) > begin + _GROWTH:
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
