"""Ctrl-C and SIGTERM save and end training, and the resumed run is the uninterrupted one; one run per directory."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from command_server import run_python
from safetensors.torch import load_file
from tiny_run import PROGRAM, Noise, logged, tiny_trainer
from transformers import TrainerCallback

from hf_recurrent.checkpoints.files import list_checkpoints
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.trainers.stop_signals import TrainingInterrupted


class Signal(TrainerCallback):
    """Sends a signal to this process at the beginning of a step, or in the evaluation after it."""

    def __init__(self, number, step, in_evaluation=False):
        self.number, self.step, self.in_evaluation = number, step, in_evaluation

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step != self.step:
            return
        if not self.in_evaluation:
            os.kill(os.getpid(), self.number)
            return

        def send(module, inputs):
            if not module.training:
                handle.remove()
                os.kill(os.getpid(), self.number)

        handle = model.register_forward_pre_hook(send)


@pytest.fixture
def usual_signals():
    """Python's own handler of Ctrl-C, which processes in the background of a shell do not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = tiny_trainer(tmp_path_factory.mktemp("whole"), callbacks=[Noise()], save_strategy="no")
    trainer.train()
    return trainer


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("save", [{"save_steps": 5}, {"save_strategy": "no"}], ids=["saving", "not saving"])
def test_a_signal_saves_and_ends(whole, tmp_path, number, save):
    before = signal.getsignal(number)
    trainer = tiny_trainer(tmp_path, callbacks=[Noise(), Signal(number, 6)], **save)
    with pytest.raises(TrainingInterrupted) as caught:
        trainer.train()
    assert caught.value.number == number
    assert caught.value.checkpoint == str(tmp_path / "checkpoint-7")
    assert signal.getsignal(number) is before
    again = tiny_trainer(tmp_path, callbacks=[Noise()])
    again.train(True)
    assert logged(again) == logged(whole)
    assert all(
        torch.equal(weight, whole.model.state_dict()[name]) for name, weight in again.model.state_dict().items()
    )


def test_a_signal_ends_an_evaluation(whole, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 100}
    trainer = tiny_trainer(tmp_path, callbacks=[Noise(), Signal(signal.SIGTERM, 3, in_evaluation=True)], **options)
    with pytest.raises(TrainingInterrupted, match="checkpoint-4"):
        trainer.train()
    assert not logged(trainer, "eval_loss")
    again = tiny_trainer(tmp_path, callbacks=[Noise()], **options)
    again.train(True)
    assert logged(again) == logged(whole)
    assert sorted(logged(again, "eval_loss")) == [8, 12]


def test_without_saving_a_signal_acts_as_usual(tmp_path, usual_signals):
    trainer = tiny_trainer(tmp_path, callbacks=[Signal(signal.SIGINT, 6)], save_on_signal=False)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert not isinstance(caught.value, TrainingInterrupted)
    assert [os.path.basename(path) for path in list_checkpoints(tmp_path)] == ["checkpoint-5"]


def test_training_in_another_thread_leaves_signals_alone(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 2


@pytest.mark.long
def test_a_second_run_in_the_same_directory_is_refused(tmp_path, environment):
    def attempt():
        return subprocess.run(
            [sys.executable, PROGRAM, os.fspath(tmp_path), "8", "1"], env=environment, capture_output=True, text=True
        )

    with output_lock(tmp_path):
        refused = attempt()
    assert refused.returncode == 1
    assert "which another running process writes to" in refused.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_the_lock_ends_with_its_process(tmp_path, commands):
    child = commands.start(run_python, [PROGRAM, os.fspath(tmp_path), "8", "1", "--slow"])
    wait_for(lambda: list_checkpoints(tmp_path))
    with pytest.raises(ValueError, match="another running process"), output_lock(tmp_path):
        pass
    child.kill()
    assert child.wait() == -signal.SIGKILL
    with output_lock(tmp_path):
        pass


@pytest.mark.long
@pytest.mark.parametrize("to_all", [True, False], ids=["all processes", "one process"])
def test_two_processes_save_at_the_same_step(two_processes, tmp_path, environment, to_all):
    """A signal reaches the processes at different steps; they agree on one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    command += [PROGRAM, os.fspath(tmp_path), "4", "1"]
    process = subprocess.Popen([*command, "--slow"], env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list_checkpoints(tmp_path), process)
    if to_all:
        process.send_signal(signal.SIGTERM)  # the launcher passes it on
    else:
        os.kill(children_of(process.pid)[0], signal.SIGTERM)
    process.communicate(timeout=120)
    last = list_checkpoints(tmp_path)[-1]
    assert 5 < int(last.rpartition("-")[2]) < 12
    assert not (tmp_path / "record.json").exists()
    subprocess.run([*command, "--resume", "true"], env=environment, capture_output=True, timeout=300)
    record = json.loads((tmp_path / "record.json").read_text())
    assert {int(step): loss for step, loss in record["losses"].items()} == two_processes.losses
    resumed = load_file(tmp_path / "final.safetensors")
    assert all(torch.equal(resumed[name], weight) for name, weight in two_processes.weights.items())


def wait_for(condition, process=None, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert (process is None or process.poll() is None) and time.monotonic() < deadline
        time.sleep(0.01)


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
