"""Runs in processes of their own: started, judged by what they leave behind."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Also for the runs that a module's tests share: a run that goes on with other threads is another segment."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def environment():
    root = os.fspath(Path(__file__).parents[2])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def launch(environment):
    """Run tiny_run.py with some arguments on 1 or 2 processes; returns its record and weights."""

    def run(output_dir, *arguments, processes=1):
        command = [sys.executable]
        if processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(port)]
        result = subprocess.run(
            [
                *command,
                os.fspath(Path(__file__).with_name("tiny_run.py")),
                os.fspath(output_dir),
                *map(str, arguments),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        record = Path(output_dir, "record.json")
        # Not the exit status: gloo sometimes aborts after everything is done.
        assert record.is_file(), result.stderr[-3000:]
        record = json.loads(record.read_text())
        assert record["world_size"] == processes
        losses = {int(step): loss for step, loss in record["losses"].items()}
        weights = load_file(os.path.join(output_dir, "final.safetensors"))
        return SimpleNamespace(record=record, losses=losses, weights=weights, stderr=result.stderr)

    return run


@pytest.fixture(scope="session")
def two_processes(launch, tmp_path_factory):
    """The uninterrupted run of 8 streams on two processes of 4."""
    directory = tmp_path_factory.mktemp("two_processes")
    result = launch(directory, 4, 1, processes=2)
    result.directory = directory
    return result
