"""Killed while it writes, again and again, and resumed: each command ends with the result of an uninterrupted run."""

import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

from hf_recurrent.cli import compress, decompress, learn, watch

TEXT = b"".join(b"12:%02d request %d served\n" % (number, number * 37 % 101) for number in range(30))
KILLED = 9


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_recurrent.compression.coding.BLOCK_CODE", 40)
    monkeypatch.setattr("hf_recurrent.compression.files._SECONDS_BETWEEN_SAVES", 0)
    (tmp_path / "text").write_bytes(TEXT)
    torch.set_num_threads(1)  # threads do not exist in forked children


def _kill_at(count, main, arguments):
    """Without any cleaning up, before file or directory number `count` gets its final name."""
    real, calls = os.replace, itertools.count(1)

    def replace(*paths):
        if next(calls) == count:
            os._exit(KILLED)
        real(*paths)

    os.replace = replace
    main(arguments)
    sys.stdout.flush()


def run_killed(main, *arguments):
    context = multiprocessing.get_context("fork")
    for count in itertools.count(4, 16):
        process = context.Process(target=_kill_at, args=(count, main, arguments))
        process.start()
        process.join(60)
        if process.exitcode != KILLED:
            assert process.exitcode == 0 and count > 4
            return


def records(directory):
    lines = Path(directory, "records.jsonl").read_text().splitlines()
    found = [json.loads(line) | {"bytes_per_second": None} for line in lines]
    return {record["bytes_read"]: record for record in found}  # the last one again, if the end was read twice


@pytest.mark.long
def test_learn(model):
    arguments = [model, "--source", "text", "--stride", "4", "--learning_rate", "1e-2", "--quiet", "--resume"]
    arguments += ["--report_every", "50", "--save_every", "200", "--output_dir"]
    learn.main([*arguments, "whole"])
    run_killed(learn.main, *arguments, "parts")
    for name in ("model.safetensors", f"checkpoint-{len(TEXT)}/learner.safetensors"):
        assert Path("parts", name).read_bytes() == Path("whole", name).read_bytes(), name
    assert records("parts") == records("whole")


def test_watch(monkeypatch):
    monkeypatch.setattr("hf_recurrent.watch.watch_run._BATCH", 1)
    arguments = ["text", "--no_follow", "--quiet", "--save_every", "1e-9"]
    watch.main([*arguments, "--output", "whole.jsonl", "--output_dir", "whole"])
    run_killed(watch.main, *arguments, "--output", "parts.jsonl", "--output_dir", "parts")
    assert Path("parts.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ways", [[], ["--learn", "--stride", "8"]], ids=["frozen", "learning"])
def test_compress(model, ways):
    compress.main([model, "text", "--quiet", "--output", "whole", *ways])
    run_killed(compress.main, model, "text", "--quiet", "--output", "parts", "--resume", *ways)
    assert Path("parts").read_bytes() == Path("whole").read_bytes()
    run_killed(decompress.main, model, "parts", "--quiet", "--output", "copy", "--resume")
    assert Path("copy").read_bytes() == TEXT
