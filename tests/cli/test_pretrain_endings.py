"""The ends of `hf-recurrent pretrain` other than success: each one sentence, and the last checkpoint stays."""

import importlib.util
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import hf_recurrent
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.cli import pretrain

ARGUMENTS = [
    "--use_cpu", "--disable_tqdm", "true", "--sample_every", "0", "--sample_bytes", "8", "--max_steps", "8",
    "--per_device_train_batch_size", "4", "--block_size", "16", "--per_device_eval_batch_size", "2",
    "--save_steps", "4", "--output_dir", "run", "--logging_steps", "1",
    "--config_overrides", "hidden_size=16", "state_size=16", "num_hidden_layers=1", "--accounts", "false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", os.fspath(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", os.fspath(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    for number in range(8):
        (tmp_path / "notes" / f"{number}.txt").write_text("All work and no play makes Jack a dull boy.\n" * 9)


def run(capsys, *arguments):
    """Run the command; returns its exit status and the last lines on standard error."""
    capsys.readouterr()
    status = 0
    try:
        pretrain.main(["--corpus", "notes", *ARGUMENTS, *arguments])
    except SystemExit as stop:
        status = stop.code
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return status, error


def checkpoints():
    return sorted(path.name for path in Path("run").glob("*checkpoint-*"))


class EachStep(TrainerCallback):
    """Calls a function at the beginning of each step, with the number of finished steps and the model."""

    def __init__(self, action):
        self.action = action

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.action(state.global_step, model)


@pytest.fixture
def each_step(monkeypatch):
    """A function that sets what happens at each step of the next runs."""
    action = {}
    prepare = pretrain.prepare

    def prepare_with_action(argv=None):
        run = prepare(argv)
        run.trainer.add_callback(EachStep(lambda *arguments: action["now"](*arguments)))
        return run

    monkeypatch.setattr(pretrain, "prepare", prepare_with_action)
    return lambda function: action.update(now=function)


@contextmanager
def largest_file(size):
    """Inside the block, files cannot grow beyond `size` bytes, as with a quota or on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_continue(capsys, each_step, number):
    each_step(lambda step, model: os.kill(os.getpid(), number) if step == 4 else None)
    status, error = run(capsys)
    assert status == 128 + number
    assert error.splitlines()[-2:] == [
        f"hf-recurrent pretrain: stopped by {number.name}; saved run/checkpoint-5.",
        "To continue, rerun the command with --output_dir run --resume_from_checkpoint true",
    ]
    each_step(lambda step, model: None)
    assert run(capsys, "--resume_from_checkpoint", "true")[0] == 0
    assert run(capsys, "--output_dir", "whole")[0] == 0
    resumed, whole = load_file("run/model.safetensors"), load_file("whole/model.safetensors")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_a_signal_before_training_ends_without_a_traceback(capsys, monkeypatch):
    def interrupt(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(pretrain, "load_training_sources", interrupt)
    status, error = run(capsys)
    assert (status, error.strip()) == (143, "hf-recurrent pretrain: stopped by SIGTERM.")
    assert not Path("run").exists()


def test_divergence_stops_with_the_way_on(capsys, each_step):
    def spoil(step, model):
        if step == 6:
            model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * float("nan"))

    each_step(spoil)
    status, error = run(capsys)
    assert status == 1
    sentence, way_on = error.strip().splitlines()[-2:]
    assert sentence.startswith("hf-recurrent pretrain: error: Training diverged in step 7: the loss is nan")
    assert "'run/checkpoint-4'" in sentence
    assert way_on == "To continue, rerun the command with --output_dir run --resume_from_checkpoint true"
    assert checkpoints() == ["checkpoint-4"]


@pytest.mark.parametrize("size", [3_000, 200_000], ids=["the model", "the optimizer"])
def test_a_full_disk_leaves_the_last_checkpoint(capsys, each_step, size):
    with largest_file(1 << 40):
        each_step(lambda step, model: resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1)) if step == 4 else None)
        status, error = run(capsys, "--config_overrides", "hidden_size=64", "state_size=16", "num_hidden_layers=1")
    assert status == 1
    sentence, way_on = error.strip().splitlines()[-2:]
    assert sentence.startswith("hf-recurrent pretrain: error: The checkpoint 'run/checkpoint-8' cannot be written: ")
    assert way_on.startswith("To continue")
    assert checkpoints() == ["checkpoint-4"]
    assert not list(Path("run").glob("_*"))
    each_step(lambda step, model: None)
    status, _ = run(
        capsys, "--config_overrides", "hidden_size=64", "state_size=16", "num_hidden_layers=1",
        "--resume_from_checkpoint", "true",
    )  # fmt: skip
    assert status == 0


def test_an_output_directory_that_cannot_be_made(capsys):
    Path("file").write_text("not a directory")
    status, error = run(capsys, "--output_dir", "file/run")
    assert status == 2
    assert error.count("\n") == 1 and "file" in error


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="the package is not missing")
def test_an_argument_whose_package_is_missing(capsys):
    status, error = run(capsys, "--use_liger_kernel")
    assert status == 2 and error.count("\n") == 1
    assert "`--use_liger_kernel`" in error and "pip install liger-kernel" in error


def test_an_option_that_the_scheduler_does_not_take(capsys):
    status, error = run(capsys, "--lr_scheduler_kwargs", '{"no_such_option": 1}')
    assert status == 2 and error.count("\n") == 1
    assert "`--lr_scheduler_kwargs` is {" in error and "'linear'" in error


@pytest.mark.parametrize("error", [MemoryError("Unable to allocate 4.00 GiB"), RuntimeError("alloc_cpu: no")])
@pytest.mark.parametrize(("place", "expected"), [("load_training_sources", 2), ("MultiStreamTrainer.train", 1)])
def test_too_little_memory(capsys, monkeypatch, place, expected, error):
    monkeypatch.setattr(f"hf_recurrent.cli.pretrain.{place}", Mock(side_effect=error))
    status, printed = run(capsys)
    assert status == expected
    assert printed.splitlines()[-1] == f"hf-recurrent pretrain: error: not enough memory; use smaller sizes ({error})"


def test_other_errors_of_torch_are_not_called_bad_input(capsys, monkeypatch):
    monkeypatch.setattr("hf_recurrent.cli.pretrain.MultiStreamTrainer.train", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run(capsys)


def test_two_runs_in_one_directory(capsys, tmp_path):
    program = "import sys, time\nfrom hf_recurrent.checkpoints.output_lock import output_lock\n"
    program += "with output_lock('run'):\n    print('locked', flush=True)\n    time.sleep(600)"
    environment = os.environ | {"PYTHONPATH": os.fspath(Path(hf_recurrent.__file__).parent.parent)}
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    try:
        assert holder.stdout.readline() == b"locked\n"
        status, error = run(capsys)
        assert status == 2
        assert "`--output_dir` is 'run', which another running process writes to" in error
        assert error.count("\n") == 1
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    with output_lock("run"):
        pass
    assert run(capsys)[0] == 0


def test_resuming_from_a_damaged_checkpoint_is_refused(capsys):
    assert run(capsys)[0] == 0
    weights = Path("run/checkpoint-8/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    before = Path("run/model.safetensors").read_bytes()
    status, error = run(capsys, "--resume_from_checkpoint", "true")
    assert status == 2
    assert "`model.safetensors` differs from its checksum" in error
    assert "Another checkpoint to resume from is 'run/checkpoint-4'" in error
    assert Path("run/model.safetensors").read_bytes() == before
    assert run(capsys, "--output_dir", "again", "--resume_from_checkpoint", "run/checkpoint-4")[0] == 0
    assert Path("again/model.safetensors").read_bytes() == before


def test_a_model_without_checkpoints_is_not_overwritten(capsys):
    assert run(capsys, "--save_strategy", "no")[0] == 0
    status, error = run(capsys, "--resume_from_checkpoint", "true")
    assert status == 2
    assert "which has a model but no checkpoint to resume" in error


def test_another_optimizer_is_refused(capsys):
    assert run(capsys, "--max_steps", "4")[0] == 0
    status, error = run(capsys, "--resume_from_checkpoint", "true", "--optim", "sgd")
    assert status == 2
    assert "`--optim` is 'sgd', but the checkpoint" in error and "trained with 'adamw_torch" in error


def test_a_checkpoint_does_not_tell_where_it_was_made(capsys, tmp_path):
    assert run(capsys, "--corpus", str(tmp_path / "notes"), "--output_dir", str(tmp_path / "run"))[0] == 0
    for path in Path("run/checkpoint-8").rglob("*"):
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes(), path
