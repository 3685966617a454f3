"""Rows: servers and chat programs."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from client_rows import row
from tiny_checkpoints import tiny_model
from transformers import GenerationConfig

from hf_recurrent import CHAT_TEMPLATE, ByteTokenizer

SERVING = ("openai", "fastapi", "uvicorn")
MESSAGES = [{"role": "user", "content": "Grüße"}]


def chat_checkpoint(folder: Path) -> Path:
    """A checkpoint with a chat template that generates greedily."""
    model = tiny_model()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(folder)
    ByteTokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    return folder


def continuation(text: str, count: int) -> str:
    """The bytes that the model of [`chat_checkpoint`] generates after `text`, as text."""
    tokenizer = ByteTokenizer()
    inputs = tokenizer(text, return_tensors="pt")
    ids = tiny_model().generate(**inputs, max_new_tokens=count, do_sample=False)[0, inputs.input_ids.shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


@contextlib.contextmanager
def server(checkpoint: Path, log: Path) -> Iterator[str]:
    """The address of a running `hf-recurrent transformers serve`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hf_recurrent.cli.main", "transformers", "serve", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    except Exception as error:
        raise AssertionError(log.read_text()[-3000:]) from error
    finally:
        process.terminate()
        process.wait(timeout=30)


@row(
    "transformers",
    "`transformers serve`: completions, chat and both as streams, with the `openai` client",
    *SERVING,
)
def transformers_serve(folder):
    from openai import OpenAI

    checkpoint = chat_checkpoint(folder / "model")
    with server(checkpoint, folder / "log") as address:
        client = OpenAI(base_url=address, api_key="none", timeout=60, max_retries=0)
        name, count = str(checkpoint), 12
        expected = continuation("def ", count)
        options = {"model": name, "prompt": "def ", "max_tokens": count}
        assert client.completions.create(**options).choices[0].text == expected
        pieces = client.completions.create(**options, stream=True)
        # The stream leaves out the bytes of a last character that is not whole.
        assert expected.startswith(
            "".join(piece.choices[0].text or "" for piece in pieces).rstrip("\N{REPLACEMENT CHARACTER}")
        )

        expected = continuation("user\nGrüße\0assistant\n", count)
        options = {"model": name, "messages": MESSAGES, "max_tokens": count}
        answer = client.chat.completions.create(**options)
        assert answer.choices[0].message.content == expected and answer.usage.prompt_tokens == 23
        pieces = client.chat.completions.create(**options, stream=True)
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text and expected.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    return "as `hf-recurrent transformers serve MODEL`; chat needs a chat template"


@row("transformers", "`transformers chat`, talking to that server", *SERVING)
def transformers_chat(folder):
    checkpoint = chat_checkpoint(folder / "model")
    with server(checkpoint, folder / "log") as address:
        command = [sys.executable, "-m", "hf_recurrent.cli.main", "transformers", "chat", str(checkpoint)]
        command += [address.removesuffix("/v1"), "max_new_tokens=5"]
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        done = subprocess.run(
            command, input="Hello\nn\n!exit\n", capture_output=True, text=True, timeout=120, env=environment
        )
    assert done.returncode == 0, done.stdout + done.stderr
