"""Rows: servers and chat programs."""

import contextlib
import json
import os
import shutil
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
def server(checkpoint: Path, log: Path, *words: str) -> Iterator[str]:
    """The address of a running `hf-recurrent transformers serve`, or of another command."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = words or ("transformers", "serve", "--device", "cpu")
    command = [sys.executable, "-m", "hf_recurrent.cli.main", *words, str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
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


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "small": {"type": "boolean"}},
    "required": ["kind", "small"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "find", "description": "finds it", "parameters": SCHEMA}}


def check_animal(text: str) -> None:
    found = json.loads(text)
    assert found.keys() == {"kind", "small"} and found["kind"] in ("cat", "dog") and isinstance(found["small"], bool)


def check_curl(address: str, answer: str) -> None:
    def post(path: str, **body) -> str:
        command = ["curl", "-sfN", f"{address}/{path}", "-H", "content-type: application/json"]
        done = subprocess.run([*command, "-d", json.dumps({"model": "m"} | body)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    text = json.loads(post("completions", prompt="def ", max_tokens=12, temperature=0))["choices"][0]["text"]
    assert text == continuation("def ", 12)
    chat = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    assert json.loads(post("chat/completions", **chat))["choices"][0]["message"]["content"] == answer
    found = json.loads(post("responses", input="Grüße", max_output_tokens=60, temperature=0))
    assert found["output"][0]["content"][0]["text"] == answer
    assert post("chat/completions", **chat, stream=True).endswith("data: [DONE]\n\n")
    found = json.loads(post("chat/completions", **chat, response_format=FORM))
    check_animal(found["choices"][0]["message"]["content"])


@row(
    "openai",
    "`hf-recurrent serve`: completions, chat, responses, streams, tools, JSON schemas; also by `curl`",
    "fastapi",
    "uvicorn",
    "prometheus-client",
    "xgrammar",
)
def serve_openai(folder):
    from openai import OpenAI

    checkpoint = chat_checkpoint(folder / "model")
    with server(checkpoint, folder / "log", "serve", "--name", "m") as address:
        client = OpenAI(base_url=address, api_key="none", timeout=60, max_retries=0)
        assert [model.id for model in client.models.list()] == ["m"]
        options = {"model": "m", "prompt": "def ", "max_tokens": 12, "temperature": 0}
        assert client.completions.create(**options).choices[0].text == continuation("def ", 12)
        chat = {"model": "m", "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
        answer = client.chat.completions.create(**chat).choices[0].message.content
        assert answer.startswith(continuation("user\nGrüße\0assistant\n", 12).rstrip("\N{REPLACEMENT CHARACTER}"))
        pieces = client.chat.completions.create(**chat, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer
        check_animal(client.chat.completions.create(**chat, response_format=FORM).choices[0].message.content)
        called = client.chat.completions.create(**chat | {"max_tokens": 200}, tools=[TOOL], tool_choice="required")
        check_animal(called.choices[0].message.tool_calls[0].function.arguments)
        body = {"model": "m", "max_output_tokens": 60, "temperature": 0}
        first = client.responses.create(**body, input="Grüße")
        assert first.output_text == answer
        second = client.responses.create(**body, input="And?", previous_response_id=first.id)
        assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens
        *_, last = client.responses.create(**body, input="Grüße", stream=True)
        assert last.response.output_text == answer
        if shutil.which("curl"):
            check_curl(address, answer)
    return "chat, responses and tools need a chat template; base models are not trained for them"


@row(
    "litellm",
    "`hf-recurrent serve`: completions, chat, responses, streams, tools, JSON schemas",
    "fastapi",
    "uvicorn",
    "prometheus-client",
    "xgrammar",
)
def serve_litellm(folder):
    import litellm

    checkpoint = chat_checkpoint(folder / "model")
    with server(checkpoint, folder / "log", "serve", "--name", "m") as address:
        common = {"api_base": address, "api_key": "none", "temperature": 0}
        found = litellm.text_completion(model="text-completion-openai/m", prompt="def ", max_tokens=12, **common)
        assert found.choices[0].text == continuation("def ", 12)
        chat = common | {"model": "openai/m", "messages": MESSAGES, "max_tokens": 60}
        answer = litellm.completion(**chat).choices[0].message.content
        pieces = litellm.completion(**chat, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer
        check_animal(litellm.completion(**chat, response_format=FORM).choices[0].message.content)
        called = litellm.completion(**chat | {"max_tokens": 200}, tools=[TOOL], tool_choice="required")
        check_animal(called.choices[0].message.tool_calls[0].function.arguments)
        response = litellm.responses(model="openai/m", input="Grüße", max_output_tokens=60, **common)
        assert response.output[0].content[0].text == answer
