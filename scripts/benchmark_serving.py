"""Latency and throughput of `hf-recurrent serve`, the latter next to a bare loop of steps; memory of sessions.

    python scripts/benchmark_serving.py --preset memora-s0 --clients 32 --history 6000

With `--history`, a client without a session sends a conversation of N bytes: new to the server (cold), once more
with its next turn (warm), and with the turn after that, when the server was killed with SIGKILL and started again.

    python scripts/benchmark_serving.py --stock mamba2 rwkv bamba --history 600

With `--stock`, the same conversation with models of transformers, of four layers and width 256, in tokens, each of
which is a byte of their tokenizer. Times are CPU times of the server, so that other processes do not count.

    python scripts/benchmark_serving.py --documents 'project/*.py' 'notes/*.md' --model model_cards/memora-s0-python

With `--documents`, bits per byte of the second of two files of one pattern, alone and after the first one in the same
session, with an adapter, with a short-term count memory, and with both. Nothing else is measured.

The clients are connections of another process, each of which streams a completion. All are kept alive, as
OpenAI's client does. The model has new weights.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_recurrent
from hf_recurrent.generation.state_reader import StateReader
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, state_size
from hf_recurrent.server.cached_steps import CachedSteps
from hf_recurrent.server.job import Scores
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.session import Session, Snapshot
from hf_recurrent.server.session_store import SessionStore

_ROUNDS = 5
_HEADERS = {"content-type": "application/json"}
_TURN_BYTES = 20
_DOCUMENT_BYTES, _PAIRS = 10_000, 3  # at most, of a document and of a pattern
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64}
STOCK = {
    "mamba": {"state_size": 16, "intermediate_size": 512},
    "falcon_mamba": {"state_size": 16, "intermediate_size": 512},
    "mamba2": {"state_size": 64, "num_heads": 8, "head_dim": 64, "n_groups": 1},
    "rwkv": {},
    "xlstm": {"embedding_dim": 256, "num_blocks": 4, "num_heads": 4},
    "recurrent_gemma": {"lru_width": 256, "head_dim": 64, "num_key_value_heads": 1},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    "bamba": {"attn_layer_indices": [1]} | _MAMBA2,
    "falcon_h1": {"head_dim": 64, "mamba_d_ssm": 512, "mamba_n_groups": 1} | _MAMBA2,
    "qwen3_next": {
        "head_dim": 64, "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="memora-s0")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--bytes", type=int, default=400, help="that each client asks for")
    parser.add_argument("--every_token", action="store_true", help="every byte is an event of its own")
    parser.add_argument("--turns", type=int, default=200, help="requests of one client whose median time is printed")
    parser.add_argument("--idle_sessions", type=int, default=10_000)
    parser.add_argument("--history", type=int, default=6000, help="bytes of a conversation; 0 to leave it out")
    parser.add_argument("--stock", nargs="+", choices=STOCK, default=[], help="model types of transformers")
    parser.add_argument("--block", type=int, help="tokens that these read at once; see `hf-recurrent serve --help`")
    parser.add_argument("--rounds", type=int, default=2, help="conversations with each of these models")
    parser.add_argument("--documents", nargs="+", metavar="PATTERN", help="files of one user for each pattern")
    parser.add_argument("--model", help="directory of a model without a count memory, for --documents")
    parser.add_argument("--adapter_rank", type=int, nargs="+", default=[16])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.stock:
        _stock_models(arguments)
        return
    if arguments.documents:
        _second_documents(arguments)
        return
    model = AutoModelForCausalLM.from_config(hf_recurrent.config_from_preset(arguments.preset)).eval()
    # Without an end byte, so that every client gets all of its bytes.
    model.generation_config.eos_token_id = None
    print("| | |\n|---|---|")
    if arguments.clients:
        _throughput(model, arguments)
    if arguments.history:
        _long_history(model, arguments.history)
    _sessions(model, arguments)


def _throughput(model, arguments: argparse.Namespace) -> None:
    limits, rounds, total = [], [], arguments.clients * arguments.bytes
    with tempfile.TemporaryDirectory() as folder:
        _save(model, hf_recurrent.ByteTokenizer(), folder)
        with _server(folder) as server:
            port = server.port
            health, turn = _in_other_process(_one_client, port, arguments.turns)
            for _ in range(_ROUNDS):  # they take turns, because the speed of a shared machine changes
                limits.append(
                    [_bare_loop(model, arguments.clients, arguments.bytes, draws) for draws in (False, True)]
                )
                before = server.cpu_seconds()
                streamed = (port, arguments.clients, arguments.bytes, arguments.every_token)
                rate, gaps, own = _in_other_process(_stream_all, *streamed)
                event_loop, process = (after - old for after, old in zip(server.cpu_seconds(), before, strict=True))
                rounds.append((rate, total / process, total / (process - event_loop), event_loop, own, *gaps))
                print(f"load {os.getloadavg()[0]:.1f}, limits {limits[-1]}, {rounds[-1]}", file=sys.stderr)
    step, bare = np.max(limits, axis=0)
    served, by_processor, by_scheduler = np.max(rounds, axis=0)[:3]
    event_loop, own, gap, longest = np.min(rounds, axis=0)[3:]
    clients = f"{arguments.clients} clients that stream"
    print(f"| `GET /health`, median | {health:.2f} ms |")
    print(f"| a session reads {_TURN_BYTES} bytes and generates {_TURN_BYTES}, median | {turn:.1f} ms |")
    print(f"| {arguments.clients} rows, bytes per second of processor time; with draws | {step:,.0f}; {bare:,.0f} |")
    print(f"| {clients}, bytes per second of the clock | {served:,.0f} |")
    print(f"| as a part of the steps; with draws | {served / step:.2f}; {served / bare:.2f} |")
    print(
        f"| per second of processor time of the scheduler; of the server | {by_scheduler:,.0f}; {by_processor:,.0f} |"
    )
    print(f"| the latter as a part of the steps; with draws | {by_processor / step:.2f}; {by_processor / bare:.2f} |")
    print(f"| seconds of processor time of the event loop; of the clients | {event_loop:.2f}; {own:.2f} |")
    print(f"| gap between two events of a stream, median; 99 % | {gap:.0f} ms; {longest:.0f} ms |")


def _save(model, tokenizer, folder: str) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class _Server(NamedTuple):
    port: int
    process: psutil.Process

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU seconds of the main thread, which runs the event loop, and of all threads."""
        main = next(thread for thread in self.process.threads() if thread.id == self.process.pid)
        times = self.process.cpu_times()
        return main.user_time + main.system_time, times.user + times.system


@contextmanager
def _server(folder: str, *options: str) -> Iterator["_Server"]:
    """A server, which is killed at the end."""
    command = [sys.executable, "-m", "hf_recurrent.cli.main", "serve", folder, "--name", "model", "--port", "0"]
    server = subprocess.Popen([*command, "--threads", "1", *options], stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stderr if "is served on" in line)
        yield _Server(int(line.rsplit(":", 1)[1].split("/")[0]), psutil.Process(server.pid))
    finally:
        server.kill()
        server.wait()


def _long_history(model, size: int) -> None:
    """Median times of turns of a conversation without a session."""
    times, _, again = _conversations(model, hf_recurrent.ByteTokenizer(), size, _ROUNDS, ())
    cold, warm, restart = (np.median(values) for values in times.values())
    print(f"| a turn of a conversation of {size:,} bytes without a session, cold, median | {cold:.1f} ms |")
    print(f"| its next turn, median | {warm:.1f} ms |")
    print(f"| the first turn after `kill -9` and a new start, median | {restart:.1f} ms |")
    print(f"| ratio of the latter two | {restart / warm:.2f} |")
    print(f"| bytes of earlier turns that were read again | {again:,} |")


def _conversations(model, tokenizer, size: int, rounds: int, options: tuple[str, ...]) -> tuple[dict, dict, int]:
    """Milliseconds of each kind of turn, CPU milliseconds, and tokens of earlier turns that were read again."""
    letters, random = [*b"abcdefghijklmnopqrstuvwxyz"], np.random.default_rng(0)
    # Letters only, because bytes that are not UTF-8 do not come back in a prompt.
    bias = {str(tokenizer(chr(letter))["input_ids"][0]): 100 for letter in letters}
    times, again = {"cold": [], "warm": [], "restart": []}, 0
    cpu_times = {kind: [] for kind in times}
    with tempfile.TemporaryDirectory() as folder:
        _save(model, tokenizer, folder)
        for _ in range(rounds):
            text = ""
            for kinds in (("new connection", "cold", "warm", "warm"), *[("restart", "warm")] * 3):
                with _server(folder, "--session_dir", os.path.join(folder, "sessions"), *options) as server:
                    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
                    _request(connection, "GET", "/health")  # answered once the server has started
                    for kind in kinds:
                        new = bytes(random.choice(letters, _TURN_BYTES if text else size).tolist()).decode()
                        if kind == "new connection":  # of another text, so that the next one is still cold
                            new = new[:_TURN_BYTES]
                        body = {"model": "model", "prompt": text + new, "max_tokens": _TURN_BYTES, "logit_bias": bias}
                        before = server.cpu_seconds()[1]
                        milliseconds, answer = _request(connection, "POST", "/v1/completions", body)
                        if kind == "new connection":
                            continue
                        times[kind].append(milliseconds)
                        cpu_times[kind].append(1000 * (server.cpu_seconds()[1] - before))
                        if text:  # the last token of an answer was generated, but never read
                            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                            again += len(text) - 1 - cached
                        text += new + answer["choices"][0]["text"]
    return times, cpu_times, again


def _stock_models(arguments: argparse.Namespace) -> None:
    print(
        "| model | bytes of a state | for each token | cold turn | warm turn | after a restart | ratio | read again |"
    )
    print("|---|---|---|---|---|---|---|---|")
    tokenizer = _byte_level_tokenizer()
    for kind in arguments.stock:
        model = AutoModelForCausalLM.from_config(_stock_config(kind)).eval()
        model.generation_config.eos_token_id = None
        options = () if arguments.block is None else ("--block", str(arguments.block))
        _, times, again = _conversations(model, tokenizer, arguments.history, arguments.rounds, options)
        steps = CachedSteps(model)
        cold, warm, restart = (f"{np.median(values):,.0f} ms" for values in times.values())
        ratio = np.median(times["restart"]) / np.median(times["warm"])
        sizes = f"{state_size(steps.zero):,} | {steps.cached.bytes_per_token:,}"
        print(f"| {kind} | {sizes} | {cold} | {warm} | {restart} | {ratio:.2f} | {again:,} |", flush=True)


def _second_documents(arguments: argparse.Namespace) -> None:
    """Each byte is predicted before anything is learned from it, as in a session of the server."""
    pairs = []
    for pattern in arguments.documents:
        files = [Path(name) for name in sorted(glob(pattern)) if Path(name).is_file()]
        texts = [text for file in files if len(text := file.read_bytes().replace(b"\0", b"")[:_DOCUMENT_BYTES]) > 2000]
        np.random.default_rng(0).shuffle(order := [*range(len(texts))])
        pairs += [(texts[one], texts[two]) for one, two in zip(order[::2], order[1::2], strict=False)][:_PAIRS]
    print(f"{len(pairs)} pairs\n\n| | bytes of a state | second document alone | after the first one | µs a byte |")
    print("|---|---|---|---|---|")
    for counts in (0, 1 << 16):
        model = AutoModelForCausalLM.from_pretrained(arguments.model, count_memory_slots=counts).eval()
        for rank in (0, *arguments.adapter_rank):
            steps = ModelSteps(model, adapter_rank=rank)
            begin = time.process_time()
            bits = np.array([_bits_of_second(steps, *pair) for pair in pairs]).sum(0)
            spent = 1e6 * (time.process_time() - begin) / sum(len(one) + 2 * len(two) for one, two in pairs)
            alone, after = bits / sum(len(two) - 1 for _, two in pairs)
            size = state_size(steps.zero) + (4 * steps.adapter.size if rank else 0)
            name = f"{'counts' if counts else 'network'}{f', adapter of rank {rank}' if rank else ''}"
            print(f"| {name} | {size:,} | {alone:.3f} | {after:.3f} | {spent:.0f} |", flush=True)


@torch.no_grad()
def _bits_of_second(steps: ModelSteps, first: bytes, second: bytes) -> list[float]:
    """Bits of a document in a session of its own, and in one that has read another one."""

    def read(text: bytes, state: RecurrentState) -> tuple[float, RecurrentState]:
        scores = Scores()
        for begin in range(0, len(text) - 1, steps.slice_length):
            piece, targets = text[begin:-1][: steps.slice_length], text[begin + 1 :][: steps.slice_length]
            logits, state = steps.read([*piece], state, targets=[*targets] if steps.adapter else None)
            scores.add(logits, [*targets])
        return sum(scores.bits()), state

    _, state = read(first + b"\n", steps.zero)
    return [read(second, steps.zero)[0], read(second, state)[0]]


def _stock_config(kind: str):
    width, config = 256, STOCK[kind]
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 2 * width}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    layers = {"vocab_size": 260, "hidden_size": width, "num_hidden_layers": 4}
    hybrid = kind not in ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
    return AutoConfig.for_model(kind, **layers | tokens | (attention if hybrid else {}) | config)


def _byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of `tokenizers` without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@torch.no_grad()
def _bare_loop(model, rows: int, steps: int, draws: bool) -> float:
    """Bytes per second of steps, with or without sampling, in processor time, of which it has one core alone."""
    state, ids, reader = model.init_state(rows), torch.randint(1, 256, (rows, 1)), StateReader(model)
    begin = time.process_time()
    for _ in range(steps):
        logits, state = reader.step(ids, state)
        if draws:
            ids = torch.multinomial(logits[:, -1].softmax(-1), 1)
    return rows * steps / (time.process_time() - begin)


def _in_other_process(function, *arguments):
    """The result of a client, whose threads must not wait for the interpreter that computes the bare loop."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def _one_client(port: int, turns: int) -> tuple[float, float]:
    """Median milliseconds of a health check and of a turn of a session, over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    session = _request(connection, "POST", "/v1/sessions")[1]["id"]
    turn = {"model": "model", "session": session, "prompt": "x" * _TURN_BYTES, "max_tokens": _TURN_BYTES}
    health = [_request(connection, "GET", "/health")[0] for _ in range(turns)]
    warm = [_request(connection, "POST", "/v1/completions", turn)[0] for _ in range(turns)]
    return float(np.median(health)), float(np.median(warm))


def _request(connection: http.client.HTTPConnection, method: str, path: str, body: dict | None = None):
    """Milliseconds until the answer is there, and the answer."""
    begin = time.perf_counter()
    connection.request(method, path, None if body is None else json.dumps(body), _HEADERS)
    response = connection.getresponse()
    data = response.read()
    milliseconds = 1000 * (time.perf_counter() - begin)
    assert response.status == 200, data
    return milliseconds, json.loads(data)


def _stream_all(
    port: int, count: int, size: int, every_token: bool = False
) -> tuple[float, tuple[float, float], float]:
    """Clients that stream at the same time, in one thread that only keeps what comes, so that it costs little.

    Returns:
        Bytes per second, median and 99 % of the milliseconds between events, the clients' seconds of processor time.
    """
    taken, times, gaps = [bytearray() for _ in range(count)], [0.0] * count, []
    selector = selectors.DefaultSelector()
    for number in range(count):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        _request(connection, "GET", "/health")
        selector.register(connection.sock, selectors.EVENT_READ, number)
    begin, begin_own = time.perf_counter(), time.process_time()
    for key in [*selector.get_map().values()]:
        body = {"model": "model", "prompt": "A", "max_tokens": size, "seed": key.data, "stream": True}
        content = json.dumps(body | {"stream_options": {"include_usage": True, "every_token": every_token}})
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        key.fileobj.sendall(f"{head}content-length: {len(content)}\r\n\r\n{content}".encode())
    while selector.get_map():
        for key, _ in selector.select():
            data, now, number = key.fileobj.recv(1 << 16), time.perf_counter(), key.data
            taken[number] += data
            if b'"text"' in data:
                if times[number]:
                    gaps.append(1000 * (now - times[number]))
                times[number] = now
            if not data or taken[number].endswith(b"0\r\n\r\n"):
                selector.unregister(key.fileobj)
    seconds, own = time.perf_counter() - begin, time.process_time() - begin_own
    received = [int(re.search(rb'"completion_tokens":(\d+)', data)[1]) for data in taken]
    assert received == [size] * count, received
    return sum(received) / seconds, (float(np.median(gaps)), float(np.quantile(gaps, 0.99))), own


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
