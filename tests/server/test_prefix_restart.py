"""After `kill -9`, the next turn of a conversation without a session reads its own text only."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cached_cases import VOCAB_SIZE, cached_model
from model_cases import tiny_model
from running_server import Client
from word_tokenizers import byte_level_tokenizer

from hf_recurrent import ByteTokenizer
from hf_recurrent.server.text_tokenizer import TextTokenizer

TOKENIZER = byte_level_tokenizer()
TEXT = TextTokenizer(TOKENIZER, VOCAB_SIZE)
# Words whose text is read back as the same tokens.
WORDS = [token for token, data in enumerate(TEXT.token_bytes) if data[:1] == b" " and data[1:].isalpha()]
LETTERS = {str(letter): 100 for letter in b"abcdefgh ,."}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    tiny_model("memora").save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


@contextmanager
def served(checkpoint: Path, *arguments: str) -> Iterator[tuple[Client, subprocess.Popen]]:
    command = [
        sys.executable,
        "-m",
        "hf_recurrent.cli.main",
        "serve",
        str(checkpoint),
        "--port",
        "0",
        "--threads",
        "1",
    ]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"is served on http://127\.0\.0\.1:(\d+)/", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield Client(int(found[1])), process
    finally:
        process.kill()
        process.wait()


def turn(client: Client, prompt: str) -> tuple[str, int]:
    found = client.complete(prompt=prompt, max_tokens=20, temperature=0, logit_bias=LETTERS)
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.long
def test_nothing_old_is_read_after_a_kill(checkpoint, tmp_path):
    letters = np.random.default_rng(0).integers(97, 123, 6000)
    text, own = bytes(letters.tolist()).decode(), tmp_path / "own"
    with served(checkpoint, "--session_dir", str(own)) as (client, process):
        answer, cached = turn(client, text)
        assert cached == 0
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
    for number in range(3):
        text += answer
        with served(checkpoint, "--session_dir", str(own)) as (client, process):
            answer, cached = turn(client, f"{text} {number}")
            assert cached == len(text) - 1  # the last byte of an answer was never fed
            os.kill(process.pid, signal.SIGKILL)
            process.wait(20)
        text += f" {number}"
    with served(checkpoint, "--prefix_bytes", "0") as (client, _):
        assert turn(client, text) == (answer, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefix_bytes", "-1"], "`--prefix_bytes` is -1"),
        (["--share_prefixes", "--prefix_bytes", "0"], "does not go with `--learn` or `--prefix_bytes 0`"),
    ],
)
def test_wrong_arguments_are_named(checkpoint, arguments, message):
    with pytest.raises(AssertionError, match=message), served(checkpoint, *arguments):
        pass


@pytest.mark.long
def test_a_chat_goes_on_after_a_kill_without_reading_again(tmp_path):
    model = cached_model("mamba2")
    folder, sessions = tmp_path / "tiny", str(tmp_path / "sessions")
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    messages = [{"role": "user", "content": "the state of the server"}]
    body = {"model": "tiny", "max_tokens": 9, "temperature": 0, "logit_bias": {str(word): 100 for word in WORDS}}
    known = 1
    for number in range(3):
        with served(folder, "--session_dir", sessions) as (client, process):
            found = client.post("/v1/chat/completions", body | {"messages": messages})
            os.kill(process.pid, signal.SIGKILL)
            process.wait(20)
        usage = found["usage"]
        # The last token of an answer was never read.
        assert usage["prompt_tokens_details"]["cached_tokens"] == known - 1
        known = usage["total_tokens"]
        answer = found["choices"][0]["message"]["content"]
        rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert answer == generated(model, rendered, 9)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"again {number}"}]


def generated(model, prompt: str, count: int) -> str:
    ids = TOKENIZER(prompt, return_tensors="pt").input_ids
    bias = {(word,): 100.0 for word in WORDS}
    output = model.generate(ids, max_new_tokens=count, do_sample=False, sequence_bias=bias)
    return TEXT.decode_bytes(output[0, ids.shape[1] :].tolist()).decode()
