"""`hf-recurrent serve` as a process: killed, stopped, and refused."""

import http.client
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from cached_cases import VOCAB_SIZE, cached_model
from model_cases import tiny_model
from running_server import Client
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from word_tokenizers import byte_level_tokenizer

from hf_recurrent import ByteTokenizer
from hf_recurrent.cli import serve

TOKENIZER = byte_level_tokenizer()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    model = tiny_model("memora")
    model.generation_config.eos_token_id = model.config.eos_token_id = None  # texts of any length
    model.save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


@contextmanager
def served(checkpoint: Path, *arguments: str) -> Iterator[tuple[Client, multiprocessing.Process, Path]]:
    """The command in a child, a client, and the file of its standard error."""
    log = checkpoint.parent / f"{uuid.uuid4()}.log"

    def run() -> None:
        with log.open("w", buffering=1) as sys.stderr:
            serve.main([str(checkpoint), "--port", "0", "--threads", "1", "--no_page", *arguments])

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    try:
        while "is served on" not in (text := log.read_text() if log.exists() else ""):
            assert process.is_alive(), text
            time.sleep(0.01)
        line = next(line for line in text.splitlines() if "is served on" in line)
        assert line.startswith("tiny is served on http://127.0.0.1:")
        yield Client(int(line.rsplit(":", 1)[1].split("/")[0])), process, log
    finally:
        process.kill()
        process.join()


def test_nothing_that_was_acknowledged_is_lost(checkpoint, tmp_path):
    """Killed while a session generates, the server comes back with every byte that a client has seen."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with served(checkpoint, "--session_dir", str(tmp_path)) as (client, process, _):
        session, other = client.new_session(), client.new_session()
        client.read(other, "This was read.")
        body = {"model": "tiny", "prompt": "Go", "session": session, "max_tokens": 60_000, "stream": True, "seed": 1}
        seen = 0
        for event in client.stream(body):
            seen += len(event["choices"][0]["text"])  # a character has at least one byte
            if seen > 600:
                break
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
    with served(checkpoint, "--session_dir", str(tmp_path)) as (client, process, _):
        assert client.get(f"/v1/sessions/{other}")["bytes_read"] == 14
        found = client.get(f"/v1/sessions/{session}")["bytes_read"]
        assert found >= 2 + seen > 602
        # The bytes are those that the seed gives, and the state is the one after reading them.
        torch.manual_seed(1)
        text = model.generate(torch.tensor([list(b"Go")]), do_sample=True, top_k=0, max_new_tokens=found - 2)[
            0
        ].tolist()
        torch.manual_seed(2)
        expected = model.generate(torch.tensor([text]), do_sample=True, top_k=0, max_new_tokens=30)[0, found:]
        new = client.complete(prompt="", session=session, max_tokens=30, seed=2, logprobs=0)["choices"][0]["logprobs"]
        assert new["tokens"] == [name(token) for token in expected.tolist()]
        process.terminate()
        process.join(20)
    with served(checkpoint, "--session_dir", str(tmp_path)) as (client, process, log):
        assert client.get(f"/v1/sessions/{session}")["bytes_read"] == found + 30
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
        assert process.exitcode == 0 and "Traceback" not in log.read_text()


def name(token: int) -> str:
    return chr(token) if token < 128 else f"bytes:\\x{token:02x}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "`--host` is '0.0.0.0', which other machines reach; give a key"),
        (["--host", "0.0.0.0", "--api_key", " "], "`--api_key` is empty"),
        (["--port", "70000"], "`--port` is 70000"),
        (["--port", "-1"], "`--port` is -1"),
        (["--max_rows", "0"], "`--max_rows` is 0; it must be at least 1"),
        (["--max_rows", "257"], "`--max_rows` is 257; it must be at most 256"),
        (["--block", "0"], "`--block` is 0; it must be at least 1"),
        (["--max_seconds", "0"], "`--max_seconds` is 0.0"),
        (["--public", "--api_keys", "x"], "`--public` does not go with"),
        (["--api_keys", "x", "--api_key", "k"], "`--api_keys` does not go with `--api_key`"),
        (["--api_keys", "no-such-file"], "no-such-file"),
        (["--log", "no/such/folder"], "no/such/folder"),
        (["--chat_template", "no-such-file"], "no-such-file"),
        (["--store", "redis2://x"], "redis2"),
        (["--stop_seconds", "-1"], "`--stop_seconds` is -1.0"),
        (["--public", "--session_dir", "x"], "`--public` does not go with"),
        (["--learn"], "`--learn` needs `--output_dir`"),
        (["--output_dir", "x"], "needs `--learn`"),
        (["--learn", "--output_dir", "x", "--stride", "0"], "`--stride` is 0"),
        (["--host", "no.such.host.invalid", "--api_key", "k"], "that address cannot be used"),
    ],
)
def test_wrong_arguments(checkpoint, arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("HF_RECURRENT_API_KEY", raising=False)
    with pytest.raises(SystemExit, match="2"):
        serve.main([str(checkpoint), *arguments])
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]


def test_two_servers_do_not_share_sessions(checkpoint, tmp_path, capsys):
    with served(checkpoint, "--session_dir", str(tmp_path)), pytest.raises(SystemExit):
        serve.main([str(checkpoint), "--session_dir", str(tmp_path)])
    assert "which another running process writes to" in capsys.readouterr().err


@pytest.mark.long
def test_several_processes_share_stored_responses_and_outlive_one_another(checkpoint, tmp_path):
    """One of three is killed under load: no answer is wrong, and the conversation goes on in any of them."""
    options = ("--processes", "3", "--chat_template", "default", "--session_dir", str(tmp_path))
    with served(checkpoint, *options) as (client, process, log):
        expected = client.complete(prompt="abc", max_tokens=20, seed=1)["choices"][0]["text"]
        children = psutil.Process(process.pid).children()
        assert len(children) == 3
        body = {"model": "tiny", "input": "Hello, how are you?", "max_output_tokens": 10, "seed": 1}
        last = client.post("/v1/responses", body)["id"]
        again = {}
        for number in range(12):
            if number == 4:
                children[0].kill()
            try:
                found = client.post("/v1/responses", body | {"previous_response_id": last, "input": "Go on"})
                last, usage = found["id"], found["usage"]
                again[number] = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
                assert client.complete(prompt="abc", max_tokens=20, seed=1)["choices"][0]["text"] == expected
            except (ConnectionError, http.client.HTTPException):
                assert number >= 4  # of the killed process
        assert len(again) >= 10 and {*again.values()} == {len("\0user\nGo on\0assistant\n") + 1}
        deadline = time.monotonic() + 60
        while len(psutil.Process(process.pid).children()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        reply = client.request("POST", "/v1/sessions")
        assert reply.status == 404
        reply = client.request("POST", "/v1/completions", {"model": "tiny", "session": "x", "max_tokens": 1})
        assert reply.status == 400 and "several processes" in reply.error()
        os.kill(process.pid, signal.SIGTERM)
        process.join(30)
        assert process.exitcode == 0 and "Traceback" not in log.read_text()
        assert not any(child.is_running() and child.status() != "zombie" for child in children)


def save(model, folder):
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_a_model_that_is_not_recurrent_is_refused(tmp_path, capsys):
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    torch.manual_seed(0)
    folder = save(LlamaForCausalLM(config), tmp_path / "llama")
    with pytest.raises(SystemExit, match="2"):
        serve.main([str(folder), "--port", "0"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "a LlamaForCausalLM: its only memory is the keys and values of attention" in error
    assert "Mamba2, FalconMamba, RWKV" in error


def test_learning_needs_bytes(tmp_path, capsys):
    folder = save(cached_model("mamba2"), tmp_path / "tiny")
    with pytest.raises(SystemExit, match="2"):
        serve.main([str(folder), "--learn", "--output_dir", str(tmp_path / "learned")])
    assert "it must have a byte tokenizer" in capsys.readouterr().err.splitlines()[-1]
