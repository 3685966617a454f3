"""`--threads`: as many as there are free cores, unless something else decides."""

import os
import subprocess
import sys
import time
from collections import namedtuple
from unittest import mock

import psutil
import pytest
import torch

from hf_recurrent.checkpoints.manifest import write_manifest
from hf_recurrent.cli import evaluate, generate, learn, pretrain_arguments, reproduce, threads

Times = namedtuple("Times", "user system idle iowait guest")


@pytest.fixture(autouse=True)
def restored_environment():
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def cores(monkeypatch):
    """A machine whose cores have worked for some seconds when they are looked at for the second time."""

    def set_cores(*busy: float, seconds: float = 10.0, own: float = 0.0, quota: float | None = None):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        readings = iter([[Times(5, 5, 5, 5, 5)] * len(busy), [Times(5 + work, 5, 9, 9, 9) for work in busy]])
        clocks = {"monotonic": iter([0.0, seconds, seconds]), "process_time": iter([1.0, 1.0 + own])}
        monkeypatch.setattr(psutil, "cpu_times", lambda percpu: next(readings))
        monkeypatch.setattr(threads, "_affinity", lambda: list(range(len(busy))))
        monkeypatch.setattr(threads, "cpu_quota", lambda: quota)
        for name, values in clocks.items():
            monkeypatch.setattr(threads.time, name, lambda values=values: next(values))
        monkeypatch.setattr(threads, "_begin", None)
        threads.observe()

    return set_cores


@pytest.mark.parametrize(
    ("busy", "options", "count", "reason"),
    [
        ((0, 0), {}, 2, "0.0 of 2 cores are busy"),
        ((10, 9), {}, 1, "1.9 of 2 cores are busy"),
        ((10, 10), {}, 1, "2.0 of 2 cores are busy"),
        ((4, 0), {}, 2, "0.4 of 2 cores are busy"),
        ((9, 0), {}, 1, "0.9 of 2 cores are busy"),
        ((9, 0), {"own": 9.0}, 2, "0.0 of 2 cores are busy"),
        ((1, 1), {"own": 5.0}, 2, "0.0 of 2 cores are busy"),
        ((0,), {}, 1, "0.0 of 1 core is busy"),
        ((0,) * 16, {"quota": 3.0}, 3, "the container may use 3.0 of 16 cores"),
        ((10,) * 14 + (0,) * 2, {"quota": 3.0}, 2, "14.0 of 16 cores are busy"),
        ((0,) * 16, {}, 8, "0.0 of 16 cores are busy"),
    ],
)
def test_free_cores_decide(busy, options, count, reason, cores):
    cores(*busy, **options)
    assert threads._choose(8, None) == (count, reason)


def test_what_else_decides(cores, monkeypatch):
    cores(10, 10, 10, 10)
    assert threads._choose(8, 3) == (3, "as in the checkpoint")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert threads._choose(8, None) == (2, "2 processes on 4 cores")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads._choose(7, 3) == (7, "OMP_NUM_THREADS is 7")


def test_a_checkpoint_of_a_larger_machine_does_not_decide(cores):
    cores(0, 0)
    assert threads._choose(8, 64) == (2, "0.0 of 2 cores are busy")


def test_the_number_is_set_and_said(cores, capsys, monkeypatch):
    torch.set_num_threads(2)
    cores(0, 10)
    threads.use_threads(None)
    assert torch.get_num_threads() == 1 and capsys.readouterr().err == "1 thread: 1.0 of 2 cores are busy\n"
    threads.use_threads(3)
    assert torch.get_num_threads() == 3 and not capsys.readouterr().err
    monkeypatch.setattr(threads, "_begin", None)  # called from Python
    threads.use_threads(None)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("fields", "count"), [({"num_threads": 3}, 3), ({}, None), ({"num_threads": "3"}, None)])
def test_a_checkpoint_records_its_threads(fields, count, tmp_path):
    write_manifest(tmp_path, num_processes=1, **fields)
    assert threads.recorded_threads(tmp_path) == count


def test_damaged_checkpoints_are_reported_later(tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    assert threads.recorded_threads(tmp_path) is None
    assert threads.recorded_threads(tmp_path / "absent") is None
    assert threads.recorded_threads(None) is None


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "5"}, {"OMP_WAIT_POLICY": "active"}, {}])
def test_the_users_way_of_waiting_wins(given, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "_begin", None)
    threads.observe()
    found = {name: os.environ[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in os.environ}
    assert found == (given or {"GOMP_SPINCOUNT": "1000"})


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({}, None),
    ],
)
def test_limits_of_containers(files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(threads, "_QUOTA", str(tmp_path / "cpu.max"))
    assert threads.cpu_quota() == cores


def test_a_busy_process_is_seen():
    begin = threads.Usage.now()
    code = "import time; end = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code]):
        time.sleep(1.0)
        assert 0.2 < threads.busy_cores(begin) <= len(threads._affinity())


@pytest.mark.parametrize(
    "parser",
    [
        evaluate.build_parser(),
        generate.build_parser(),
        learn.build_parser(),
        reproduce.build_parser(),
        *map(pretrain_arguments.build_parser, ("bptt", "rtrl", "smt", "dmt")),
    ],
    ids=lambda parser: parser.prog,
)
def test_every_command_that_computes_has_the_flag(parser):
    (action,) = (action for action in parser._actions if "--threads" in action.option_strings)
    assert action.type is int and action.default == (1 if parser.prog.endswith("learn") else None)
