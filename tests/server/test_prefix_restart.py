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
from model_cases import tiny_model
from running_server import Client

from hf_recurrent import ByteTokenizer

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
