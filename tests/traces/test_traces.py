"""Everything that trains, measures and generates computes the numbers that were recorded.

On the machine of the recording bit for bit, elsewhere close to them. `TRACES=exact` asks for equal bits whatever the
machine. See `record.py` for how to record anew.
"""

import gc
import json
import os
from pathlib import Path

import pytest
import torch
from breadth import some_of
from saved_runs import extract
from trace_machine import machine_facts
from trace_values import count_compared, differences
from traced_runs import RESUMED, RUNS, SAVED, after_resuming, tolerance_of

RECORDING = json.loads(Path(__file__).with_name("traces.json").read_text(encoding="utf-8"))
CHANGED = {
    name: f"{RECORDING['machine'].get(name)!r}, now {value!r}"
    for name, value in machine_facts().items()
    if RECORDING["machine"].get(name) != value
}
EXACT = not CHANGED or os.environ.get("TRACES") == "exact"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()  # trainers collect garbage: not of all modules each time
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def assert_same(name, trace, expected, *, exact=EXACT):
    tolerance = None if exact else tolerance_of(name)
    assert count_compared(expected, tolerance) >= 1
    found = list(differences(trace, expected, tolerance))
    how = "bit for bit" if exact else f"close, because the machine is another one: {CHANGED}"
    assert not found, f"{name} ({how}): {len(found)} of {len(expected)} differ\n" + "\n".join(found[:20])


QUICK = (
    "streams memora", "streams hawk", "streams samples", "online rtrl", "online truncated", "smt", "dmt",
    "learner rtrl", "learner stride 4", "bits per byte", "tasks", "corpora", "pretrain", "pretrain smt", "evaluate",
    "generate", "learn",
)  # fmt: skip


@pytest.mark.parametrize("name", some_of(RUNS, QUICK))
def test_run_is_as_recorded(name, tmp_path):
    expected = RECORDING["traces"][name]
    whole = tmp_path / "whole"
    assert_same(name, RUNS[name](whole), expected)
    if name in RESUMED:
        again = RUNS[name].resumed(tmp_path / "again", whole)
        assert_same(f"{name}, resumed", again, after_resuming(expected, again))


def test_every_run_is_recorded():
    assert set(RECORDING["traces"]) == set(RUNS)


def test_bits_are_compared():
    if not EXACT:
        pytest.skip(f"numbers are compared to 1e-4 only, because the machine is another one: {CHANGED}")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SAVED)
def test_saved_run_continues_as_recorded(name, tmp_path):
    """Files of an earlier version, read by this one."""
    again = RUNS[name].resumed(tmp_path / "again", extract(name, tmp_path / "whole"))
    # Archives were written on other machines than the traces.
    assert_same(f"{name}, from its archive", again, after_resuming(RECORDING["traces"][name], again), exact=False)
