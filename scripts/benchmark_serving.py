"""Bytes per second of many clients of `hf-recurrent serve`, next to one batch in a bare loop; memory of sessions.

    python scripts/benchmark_serving.py --preset memora-s0 --clients 32

The clients are threads of a process of their own, each of which streams a completion. The model has new weights.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import torch
from transformers import AutoModelForCausalLM

import hf_recurrent
from hf_recurrent.modeling.block.recurrent_state import state_size
from hf_recurrent.server.session import Session, Snapshot
from hf_recurrent.server.session_store import SessionStore

_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="memora-s0")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--bytes", type=int, default=400, help="that each client asks for")
    parser.add_argument("--idle_sessions", type=int, default=10_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_recurrent.config_from_preset(arguments.preset)).eval()
    # Without an end byte, so that every client gets all of its bytes.
    model.generation_config.eos_token_id = None
    print("| | |\n|---|---|")
    if arguments.clients:
        _throughput(model, arguments)
    _sessions(model, arguments)


def _throughput(model, arguments: argparse.Namespace) -> None:
    bare, served = 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        hf_recurrent.ByteTokenizer().save_pretrained(folder)
        command = [sys.executable, "-m", "hf_recurrent.cli.main", "serve", folder, "--name", "model", "--port", "0"]
        server = subprocess.Popen([*command, "--threads", "1"], stderr=subprocess.PIPE, text=True)
        line = next(line for line in server.stderr if "is served on" in line)
        port = int(line.rsplit(":", 1)[1].split("/")[0])
        try:
            for _ in range(_ROUNDS):  # they take turns, because the speed of a shared machine changes
                bare = max(bare, _bare_loop(model, arguments.clients, arguments.bytes))
                served = max(served, _clients(port, arguments.clients, arguments.bytes))
                print(f"bare {bare:,.0f}, served {served:,.0f}", file=sys.stderr)
        finally:
            server.terminate()
            server.wait()
    print(f"| bytes per second, one batch of {arguments.clients} in a bare loop | {bare:,.0f} |")
    print(f"| {arguments.clients} clients that stream | {served:,.0f} |")
    print(f"| ratio | {served / bare:.2f} |")


@torch.no_grad()
def _bare_loop(model, rows: int, steps: int) -> float:
    """Bytes per second of sampling without a server."""
    state, ids = model.init_state(rows), torch.randint(1, 256, (rows, 1))
    begin = time.perf_counter()
    for _ in range(steps):
        output = model(ids, state=state, use_cache=True)
        state = output.state
        ids = torch.multinomial(output.logits[:, -1].softmax(-1), 1)
    return rows * steps / (time.perf_counter() - begin)


def _clients(port: int, count: int, size: int) -> float:
    """Bytes per second of clients in another process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_stream_all, (port, count, size))


def _stream_all(port: int, count: int, size: int) -> float:
    received = [0] * count

    def stream(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = {"model": "model", "prompt": "A", "max_tokens": size, "seed": number, "stream": True}
        body["stream_options"] = {"include_usage": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        for line in connection.getresponse():
            if b'"usage"' in line:
                received[number] = json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(count)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    assert received == [size] * count, received
    return sum(received) / seconds


def _sessions(model, arguments: argparse.Namespace) -> None:
    zero = model.init_state(1)
    print(f"| bytes of a state | {state_size(zero):,} |")
    process = psutil.Process()
    before, store = process.memory_info().rss, SessionStore(zero)
    for _ in range(arguments.idle_sessions):
        store.add(Session(Snapshot({name: part.clone() for name, part in zero.items()}, 65, 20)))
    grown = process.memory_info().rss - before
    print(f"| {arguments.idle_sessions:,} idle sessions, all in memory | {grown / 2**20:,.0f} MiB |")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
