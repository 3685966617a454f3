"""A run that is continued from a checkpoint is the uninterrupted run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import MAX_STEPS, PROGRAM, Noise, logged, tiny_corpora, tiny_model, tiny_trainer

from hf_recurrent import ByteTokenizer, Corpus
from hf_recurrent.checkpoints.files import checkpoint_number, list_checkpoints, load_tree, save_tree
from hf_recurrent.checkpoints.manifest import write_manifest

ALLOWED = {".safetensors", ".json", ".py"}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run of one process, with something random in each step."""
    trainer = tiny_trainer(tmp_path_factory.mktemp("whole"), callbacks=[Noise()], max_grad_norm=0.5)
    trainer.train()
    return trainer


@pytest.mark.parametrize("step", [5, 10])
def test_resume_is_bit_for_bit(whole, tmp_path, step):
    torch.manual_seed(step)  # whatever happened in between
    checkpoint = Path(whole.args.output_dir, f"checkpoint-{step}")
    trainer = tiny_trainer(tmp_path, callbacks=[Noise()], max_grad_norm=0.5)
    trainer.train(str(checkpoint))
    # Steps 5 and 10 lie between the log's 3, 6, 9, 12: the losses not logged yet are in the checkpoint.
    assert logged(trainer) == logged(whole)
    assert logged(trainer, "state_resets") == logged(whole, "state_resets")
    assert_same(trainer.model.state_dict(), whole.model.state_dict())
    last = f"checkpoint-{MAX_STEPS}"
    for name in ("streams_rank0.safetensors", "optimizer.safetensors", "process_rank0.safetensors"):
        assert_same(load_file(tmp_path / last / name), load_file(Path(whole.args.output_dir, last, name)))


@pytest.mark.parametrize("arguments", [{"regime": "iid"}, {"dataloader_num_workers": 2}], ids=["iid", "workers"])
def test_resume_of_other_streams(tmp_path, arguments):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **arguments}
    first = tiny_trainer(tmp_path / "a", **options)
    first.train()
    second = tiny_trainer(tmp_path / "b", **options)
    second.train(str(tmp_path / "a" / "checkpoint-5"))
    assert logged(second) == logged(first)
    assert_same(second.model.state_dict(), first.model.state_dict())


def test_true_takes_the_last_and_a_finished_run_stays(whole, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(whole.args.output_dir, directory)
    trainer = tiny_trainer(directory, callbacks=[Noise()], max_grad_norm=0.5)
    trainer.train(True)
    assert trainer.state.global_step == MAX_STEPS
    assert_same(trainer.model.state_dict(), whole.model.state_dict())


def test_nothing_in_a_checkpoint_executes(whole):
    files = [path for path in Path(whole.args.output_dir).rglob("*") if path.is_file()]
    assert len(files) > 20
    assert {path.suffix for path in files} <= ALLOWED
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".safetensors":
            load_file(path)


def test_reading_a_checkpoint_never_unpickles(whole, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    tiny_trainer(tmp_path, callbacks=[Noise()], max_steps=MAX_STEPS).train(
        os.path.join(whole.args.output_dir, "checkpoint-10")
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"per_device_train_batch_size": 4}, "has 8 streams, but .* is 4"),
        ({"block_size": 8}, "`block_size` 16, but it is 8 now"),
        ({"regime": "iid"}, "`regime` 'multi_stream', but it is 'iid' now"),
        ({"seed": 1}, "`data_seed` 42, but it is 1 now"),
        ({"model": {"hidden_size": 32}}, r"has shape \(256, 16\) in the checkpoint .* \(256, 32\) in the model"),
        ({"model": {"state_size": 48}}, "has the states of another model"),
        ({"corpora": True}, "trained on the corpus 'toy' .* this corpus is 'other'"),
    ],
)
def test_checkpoint_of_another_run(whole, tmp_path, arguments, words):
    if "model" in arguments:
        arguments = {"model": tiny_model(**arguments["model"])}
    if "corpora" in arguments:
        other = Corpus.from_documents([b"abc" * 20, b"xyz" * 30], ByteTokenizer(), name="other")
        arguments = {"corpora": (other, other)}
    trainer = tiny_trainer(tmp_path, **arguments)
    with pytest.raises(ValueError, match=words):
        trainer.train(os.path.join(whole.args.output_dir, "checkpoint-5"))


def test_incomplete_or_damaged_checkpoint(whole, tmp_path):
    trainer = tiny_trainer(tmp_path / "empty")
    with pytest.raises(ValueError, match="no checkpoint in `output_dir`"):
        trainer.train(True)
    broken = tmp_path / "run" / "checkpoint-5"
    shutil.copytree(Path(whole.args.output_dir, "checkpoint-5"), broken)
    (broken / "optimizer.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"`optimizer\.safetensors` has 100 bytes instead of"):
        tiny_trainer(tmp_path / "run").train(str(broken))
    (broken / "optimizer.safetensors").unlink()
    with pytest.raises(ValueError, match=r"`optimizer\.safetensors` is missing"):
        tiny_trainer(tmp_path / "run").train(str(broken))
    with pytest.raises(ValueError, match=r"`optimizer\.safetensors` is missing"):
        tiny_trainer(tmp_path / "run").train(True)  # never a new run over a damaged one


def test_missing_stream_is_noticed(whole, tmp_path):
    broken = tmp_path / "checkpoint-5"
    shutil.copytree(Path(whole.args.output_dir, "checkpoint-5"), broken)
    streams = load_file(broken / "streams_rank0.safetensors")
    save_file({name: tensor[:-1].clone() for name, tensor in streams.items()}, broken / "streams_rank0.safetensors")
    write_manifest(broken, num_processes=1)
    with pytest.raises(ValueError, match="no position of stream 7"):
        tiny_trainer(tmp_path / "run").train(str(broken))


def test_a_replacement_that_was_cut_off(whole, tmp_path):
    """Between the two renames, the old checkpoint is there under another name."""
    shutil.copytree(Path(whole.args.output_dir, "checkpoint-5"), tmp_path / "_replaced-checkpoint-5")
    assert list_checkpoints(tmp_path) == [str(tmp_path / "_replaced-checkpoint-5")]


def test_old_checkpoints_are_removed(tmp_path):
    tiny_trainer(tmp_path, save_steps=2, save_total_limit=2).train()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-12"}


def test_trees_of_tensors_and_numbers(tmp_path):
    tree = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(2, 3, dtype=torch.bfloat16)}, 1: {}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1], "fused": None, "maximize": False}],
        "big": 2**62,
    }
    save_tree(tree, tmp_path, "tree")
    loaded = load_tree(tmp_path, "tree")
    assert loaded["groups"] == tree["groups"] and loaded["big"] == tree["big"]
    assert loaded["state"].keys() == {0, 1}
    assert torch.equal(loaded["state"][0]["exp_avg"], tree["state"][0]["exp_avg"])
    with pytest.raises(TypeError, match=r"`tree\.a` is a object"):
        save_tree({"a": object()}, tmp_path, "tree")


@pytest.mark.long
def test_kill_while_a_checkpoint_is_written(tmp_path, environment):
    """kill -9, then to the end; tests/faults/kill_runs.py kills at random moments."""
    whole = tiny_trainer(tmp_path / "whole", callbacks=[Noise()], save_strategy="no")
    whole.train()
    directory = tmp_path / "killed"
    command = [sys.executable, PROGRAM, os.fspath(directory), "8", "1", "--noise", "--save_steps", "1"]

    def steps():
        return max((checkpoint_number(path) for path in list_checkpoints(directory)), default=0)

    process = subprocess.Popen([*command, "--slow"], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if steps() >= 2 and any(directory.glob("_staging-*")):
            break
        time.sleep(0.002)
    assert process.poll() is None, process.stderr.read().decode()[-2000:]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert 2 <= steps() < MAX_STEPS
    subprocess.run([*command, "--resume", "true"], env=environment, check=True, capture_output=True)
    losses = json.loads((directory / "record.json").read_text())["losses"]
    assert {int(step): loss for step, loss in losses.items()} == logged(whole)
    assert_same(load_file(directory / "final.safetensors"), dict(whole.model.state_dict()))
    assert not list(directory.glob("_*"))


@pytest.mark.long
def test_resume_on_two_processes(two_processes, launch, tmp_path):
    checkpoint = two_processes.directory / "checkpoint-5"
    assert {path.suffix for path in checkpoint.iterdir()} <= ALLOWED
    assert (checkpoint / "streams_rank1.safetensors").is_file()

    again = launch(tmp_path / "two", 4, 1, "--resume", checkpoint, processes=2)
    assert again.losses == two_processes.losses
    assert_same(again.weights, two_processes.weights)


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [2, 1])
def test_resume_of_two_processes_on_one(two_processes, tmp_path, accumulation):
    trainer = tiny_trainer(
        tmp_path, per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation
    )
    trainer.train(str(two_processes.directory / "checkpoint-5"))
    assert {str(step): n for step, n in logged(trainer, "state_resets").items()} == two_processes.record["resets"]
    assert logged(trainer) == pytest.approx(two_processes.losses, rel=1e-6)
    if accumulation == 2:
        # The same groups of streams, added up in the same order: the same bits.
        assert logged(trainer) == two_processes.losses
        assert_same(dict(trainer.model.state_dict()), two_processes.weights)
    # One phase, with the number of processes of each part; the bytes are counted over both processes.
    (phase,) = trainer.provenance.phases
    parts = [(part.first_step, part.last_step, part.processes, part.read) for part in phase.segments]
    assert parts == [(0, 5, 2, 5 * 8 * 16), (5, MAX_STEPS, 1, (MAX_STEPS - 5) * 8 * 16)]


def test_checkpoint_streams_are_those_of_the_corpus(whole):
    """Stored positions are the trained ones, by stream number: 10 blocks of 16 bytes."""
    stored = load_file(Path(whole.args.output_dir, "checkpoint-10", "streams_rank0.safetensors"))
    assert stored["stream_indices"].tolist() == list(range(8))
    from hf_recurrent import MultiStreamDataset

    batches = iter(MultiStreamDataset(tiny_corpora()[0], 8, 16, seed=whole.args.seed))
    for _ in range(10):
        batch = next(batches)
    assert torch.equal(stored["positions"], batch["stream_positions"])
    assert stored["state.layers.0.recurrent"].shape == (8, 24)
