"""`hf-recurrent learn --resume` and `--restart`: nothing damaged or changed is used, and nothing is lost."""

import gzip
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_recurrent import OnlineLearner
from hf_recurrent.checkpoints.manifest import write_manifest
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.cli.learn import main

STREAM = b"".join(b"line %d of the log\n" % (number * 37 % 101) for number in range(9))
HALF = STREAM[:80]
OTHER = b"".join(b"another text, number %d\n" % number for number in range(20))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hf_recurrent.online.sources._MOMENT", 0.01)
    torch.set_num_threads(1)  # as the command


def write(data, name="log.txt"):
    Path(name).write_bytes(data)


def learn(model, *arguments, source="log.txt", output="out"):
    settings = ["--learning_rate", "1e-2", "--stride", "16", "--quiet", "--timeout", "0.05"]
    main([model, "--source", source, "--output_dir", output, *settings, *arguments])


def refused(capsys, match, model, *arguments, status=2, **options):
    """The command says one sentence, and changes no file."""
    before = snapshot()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        learn(model, *arguments, **options)
    error = capsys.readouterr().err
    assert stop.value.code == status, error
    lines = error.splitlines()
    assert lines[-1].startswith("hf-recurrent learn: error: ") and "Traceback" not in error
    assert re.search(match, lines[-1]), lines[-1]
    if status == 2:
        assert snapshot() == before
    return lines[-1]


def snapshot():
    return {
        os.fspath(path): path.read_bytes() if path.is_file() else None
        for path in sorted(Path().rglob("*"))
        if path.exists() and not path.is_fifo()
    }


def learned(output="out"):
    return AutoModelForCausalLM.from_pretrained(output).state_dict()


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def expected(model, *parts):
    """Weights after these parts of a stream, with a flush after each."""
    learner = OnlineLearner(AutoModelForCausalLM.from_pretrained(model), learning_rate=1e-2, stride=16)
    for part in parts:
        learner.read(part)
        learner.flush()
    return dict(learner.model.state_dict())


@pytest.fixture(scope="module")
def first_half(model, tmp_path_factory):
    """(directory, copy) with a run on the first part of a log, which is one file in both: its inode is known."""
    folder, copy = tmp_path_factory.mktemp("half"), tmp_path_factory.mktemp("copy")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write(HALF)
        learn(model)
    shutil.copytree(folder / "out", copy / "out")
    os.link(folder / "log.txt", copy / "log.txt")
    return folder, copy


@pytest.fixture
def half(first_half, monkeypatch):
    """A run of which the first part is done; the log has grown since."""
    folder, copy = first_half
    shutil.rmtree(folder)
    shutil.copytree(copy / "out", folder / "out")
    os.link(copy / "log.txt", folder / "log.txt")
    monkeypatch.chdir(folder)
    write(STREAM)
    return Path(f"out/checkpoint-{len(HALF)}")


# ---- Damaged checkpoints ----


@pytest.mark.parametrize("name", ["learner.json", "learner.safetensors", "model.safetensors", "config.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "flipped"])
def test_a_damaged_checkpoint_is_named_and_nothing_starts_again(model, half, capsys, name, damage):
    path = half / name
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage != "missing":
        data[len(data) // 2] ^= 4
        path.write_bytes(b"" if damage == "empty" else data)
    message = refused(capsys, rf"out/checkpoint-80` is damaged: `{name}` .*", model, "--resume")
    assert message.endswith("; to begin anew, use --restart instead of --resume.")
    if damage == "empty":
        learn(model, "--restart")
        assert same(learned(), expected(model, STREAM))


def test_an_older_checkpoint_is_named(model, half, capsys):
    older, newer = half, Path("out/checkpoint-90")
    shutil.copytree(older, newer)
    (newer / "learner.json").unlink()
    shutil.copytree(older, "out/checkpoint-85")
    (Path("out/checkpoint-85") / "config.json").unlink()
    message = refused(capsys, "checkpoint-90` is damaged: `learner.json` is missing", model, "--resume")
    assert message.endswith(f"; to resume from {older}, remove {newer} and out/checkpoint-85.")
    shutil.rmtree(newer)
    shutil.rmtree("out/checkpoint-85")
    learn(model, "--resume")
    assert same(learned(), expected(model, HALF, STREAM[80:]))


def test_a_replacement_that_was_interrupted(model, half, capsys):
    replaced = half.with_name("_replaced-checkpoint-80")
    half.rename(replaced)
    Path("out/_staging-checkpoint-80").mkdir()
    learn(model, "--resume")
    assert same(learned(), expected(model, HALF, STREAM[80:]))
    assert [path.name for path in Path("out").glob("*checkpoint-*")] == [f"checkpoint-{len(STREAM)}"]


def test_the_name_of_a_checkpoint_is_its_position(model, half, capsys):
    half.rename("out/checkpoint-90")
    refused(capsys, "checkpoint-90.* byte 80", model, "--resume")


def test_missing_weights_are_named(model, half, capsys):
    weights = load_file(half / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    save_file(weights, half / "model.safetensors", {"format": "pt"})
    write_manifest(half)
    refused(capsys, "the weight `model.embed_tokens.weight`", model, "--resume")


@pytest.mark.parametrize(
    "values",
    [
        {"source": 5},
        {"bytes_before": -1},
        {"bytes_before": 10**9},
        {"file": 7},
        {"file": {"digest": 5}},
        {"source": None},
    ],
)
def test_hostile_metadata_is_refused(model, half, capsys, values):
    content = json.loads((half / "learner.json").read_text())
    content["metadata"] |= values
    (half / "learner.json").write_text(json.dumps(content))
    write_manifest(half)
    refused(capsys, rf"{half}.*metadata", model, "--resume")


def test_damaged_records_are_named(model, half, capsys):
    lines = Path("out/records.jsonl").read_text().splitlines(keepends=True)
    Path("out/records.jsonl").write_text(lines[0] + "garbage\n" + "".join(lines[1:]))
    refused(capsys, r"out/records\.jsonl`, line 2, is not a record", model, "--resume")
    Path("out/records.jsonl").write_text("".join(lines) + '{"bytes_re')
    learn(model, "--resume")


# ---- Directories ----


def test_resume_where_nothing_can_be_lost_starts(model, capsys):
    write(STREAM)
    main([model, "--source", "log.txt", "--output_dir", "loud", "--resume"])
    assert "loud has no checkpoint to resume; a new run begins" in capsys.readouterr().err
    learn(model, "--resume")  # no directory
    assert same(learned(), expected(model, STREAM))
    Path("killed").mkdir()
    Path("killed/records.jsonl").write_text('{"bytes_read": 0, "updates": 0}\n')  # killed before the first checkpoint
    Path("killed/_lock").touch()
    Path("killed/_staging-checkpoint-50").mkdir()
    learn(model, "--resume", output="killed")
    assert same(learned("killed"), learned())


def test_resume_without_the_checkpoints_of_a_model(model, half, capsys):
    shutil.rmtree(half)
    message = refused(
        capsys, "`--output_dir` is 'out'; it has a model, but no checkpoint to resume", model, "--resume"
    )
    assert message.endswith("--restart.")


def test_restart_is_only_for_runs_of_this_command(model, capsys):
    write(STREAM)
    Path("full").mkdir()
    Path("full/letter").touch()
    refused(capsys, "with --restart, it must have a run of this command", model, "--restart", output="full")
    Path("trained/checkpoint-7").mkdir(parents=True)
    Path("trained/checkpoint-7/trainer_state.json").touch()
    refused(capsys, "with --restart, it must have a run of this command", model, "--restart", output="trained")
    learn(model, "--restart")  # a new directory
    Path("out/checkpoint-7").mkdir()
    Path("out/checkpoint-7/trainer_state.json").touch()
    refused(capsys, "out/checkpoint-7 is not a checkpoint of this command", model, "--restart")
    refused(capsys, "not allowed with argument", model, "--restart", "--resume")


def test_a_restart_that_fails_early_keeps_the_run(model, half, capsys):
    refused(capsys, "file not found", model, "--restart", source="nowhere.txt")
    refused(capsys, "argument --rule: invalid choice: 'bptt'", model, "--restart", "--rule", "bptt")
    assert half.is_dir()


def test_a_restart_from_its_own_model(model, half):
    trained = OnlineLearner.load(half).model.state_dict()
    learn("out", "--restart", source="log.txt")
    learner = OnlineLearner(AutoModelForCausalLM.from_pretrained(model), learning_rate=1e-2, stride=16)
    learner.model.load_state_dict(trained)
    learner.read(STREAM)
    learner.flush()
    assert same(learned(), dict(learner.model.state_dict()))
    assert [path.name for path in Path("out").glob("checkpoint-*")] == [f"checkpoint-{len(STREAM)}"]


def _hold(directory, held, release):
    with output_lock(directory):
        held.set()
        release.wait(60)


def test_two_runs_in_one_directory(model, half, capsys):
    context = multiprocessing.get_context("fork")
    held, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=("out", held, release))
    process.start()
    held.wait(60)
    for arguments in (["--resume"], ["--restart"]):
        refused(capsys, "another running process", model, *arguments)
    release.set()
    process.join()
    learn(model, "--resume")
    assert not Path("out/_lock").exists()


# ---- Changed logs ----


def test_a_grown_log_continues(model, half):
    learn(model, "--resume")
    assert same(learned(), expected(model, HALF, STREAM[80:]))


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_a_replaced_log_is_noticed(model, half, capsys, follow):
    write(OTHER, "new")
    os.replace("new", "log.txt")
    message = refused(
        capsys, "'log.txt' has other bytes before byte 80 .* replaced by another file", model, "--resume"
    )
    assert "--restart" in message
    learn(model, "--restart")
    assert same(learned(), expected(model, OTHER))


def test_a_log_that_was_truncated_and_has_grown_again_is_noticed(model, half, capsys):
    write(OTHER)
    refused(capsys, "'log.txt' has other bytes before byte 80 .* changed or written anew", model, "--resume")
    write(b"new")
    refused(capsys, "has 3 bytes, fewer than the 80", model, "--resume")


def test_a_compressed_log_that_changed_is_noticed(model, capsys):
    write(gzip.compress(HALF), "log.gz")
    learn(model, source="log.gz")
    write(gzip.compress(OTHER), "log.gz")
    refused(capsys, "'log.gz' has other bytes before byte 80", model, "--resume", source="log.gz")
    write(gzip.compress(STREAM), "log.gz")
    learn(model, "--resume", source="log.gz")
    assert same(learned(), expected(model, HALF, STREAM[80:]))


def test_a_rotated_log_is_finished_under_its_new_name(model, half, capsys):
    os.rename("log.txt", "log.txt.1")
    write(OTHER)
    refused(capsys, "replaced by another file.*new name", model, "--resume")
    learn(model, "--resume", source="log.txt.1")
    learn(model, "--resume", source="log.txt")
    assert same(learned(), expected(model, HALF, STREAM[80:], OTHER))


def test_a_new_source_that_has_the_inode_of_the_old_one(model, half):
    Path("log.txt").write_bytes(OTHER)  # as after removing the log and creating another file
    os.rename("log.txt", "other.txt")
    learn(model, "--resume", source="other.txt")
    assert same(learned(), expected(model, HALF, OTHER))


def test_standard_input_from_a_file_is_that_file(model, half, capsys, monkeypatch):
    write(OTHER[:100])
    with open("log.txt", "rb") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", file)
        learn(model, "--resume", source="-")
    write(OTHER)
    learn(model, "--resume")
    assert same(learned(), expected(model, HALF, OTHER[:100], OTHER[100:]))


def test_the_position_is_right_after_a_stop_within_a_chunk(model, monkeypatch, capsys):
    """The source is ahead of the learner then."""
    write(STREAM)
    real = OnlineLearner.read

    def read(self, data):
        if self.bytes_read >= 64:
            raise OSError("the disk is gone")
        return real(self, data)

    monkeypatch.setattr(OnlineLearner, "read", read)
    with pytest.raises(SystemExit):
        learn(model, "--report_every", "10")
    monkeypatch.setattr(OnlineLearner, "read", real)
    learn(model, "--resume")
    whole = OnlineLearner(AutoModelForCausalLM.from_pretrained(model), learning_rate=1e-2, stride=16)
    whole.read(STREAM)
    whole.flush()
    assert same(learned(), dict(whole.model.state_dict()))


# ---- Disks ----


@pytest.mark.parametrize("limit", [400, 20_000, 30_000])
def test_a_full_disk_keeps_the_last_checkpoint(model, half, limit, capsys):
    """Records, learner or model do not fit any more: one error, and the checkpoint is as it was."""
    before = {path.name: path.read_bytes() for path in half.iterdir()}
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, own[1]))
    try:
        with pytest.raises(SystemExit) as stop:
            learn(model, "--resume", "--report_every", "4", "--save_every", "20")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, own)
    error = capsys.readouterr().err
    assert stop.value.code == 1, error
    lines = error.splitlines()
    assert lines[-1].startswith("hf-recurrent learn: error: ") and "File too large" in lines[-1]
    assert "Traceback" not in error and lines[-1].endswith(f"The last checkpoint is {half}.")
    assert {path.name: path.read_bytes() for path in half.iterdir()} == before
    assert not list(Path("out").glob("_*"))
    learn("unused", "--resume")
    assert same(learned(), expected(model, HALF, STREAM[80:]))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory(model, half, capsys):
    os.chmod("out", 0o555)
    try:
        refused(capsys, "out", model, "--resume")
    finally:
        os.chmod("out", 0o755)


def test_a_link_instead_of_the_records(model, half, capsys):
    write(b"dear", "letter")
    os.rename("out/records.jsonl", "records")
    os.symlink("../letter", "out/records.jsonl")
    refused(capsys, r"out/records\.jsonl", model, "--resume")
    refused(capsys, r"out/records\.jsonl", model, "--restart")
    assert Path("letter").read_bytes() == b"dear"


@pytest.mark.parametrize("name", ["_lock", f"_staging-checkpoint-{len(STREAM)}", "_staging-model"])
def test_nothing_is_written_through_a_link(model, half, capsys, name):
    Path("outside").mkdir()
    write(b"dear", "outside/letter")
    os.symlink("../outside/letter" if name == "_lock" else "../outside", f"out/{name}")
    refused(
        capsys, name if name == "_lock" else "cannot be written", model, "--resume", status=2 if name == "_lock" else 1
    )
    assert os.listdir("outside") == ["letter"] and Path("outside/letter").read_bytes() == b"dear"


@pytest.fixture
def impatient_terminal():
    """SIGTERM again and again, in the main thread, until the test ends; the hundredth is an error."""
    received, done = itertools.count(1), threading.Event()

    def count(number, frame):
        assert next(received) < 100, "the command does not stop"

    def send():
        while not done.wait(0.1):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, count)
    thread = threading.Thread(target=send)
    yield thread
    done.set()
    thread.join()
    signal.signal(signal.SIGTERM, before)


def test_a_pipe_without_a_writer_can_be_stopped(model, impatient_terminal, capsys):
    os.mkfifo("pipe")
    impatient_terminal.start()
    main([model, "--source", "pipe", "--output_dir", "out", "--stride", "4"])
    shown = capsys.readouterr()
    assert "learning by rtrl from pipe" in shown.err and "stopped at byte 0" in shown.out
