"""Freed memory returns to the system or is kept, in processes of their own."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from hf_recurrent.kernels.output_memory import OutputMemory
from hf_recurrent.trainers import freed_memory

# Page faults of the second of two equal rounds of allocations, whose blocks are freed together.
FAULTS = """
import resource, sys
from hf_recurrent.trainers import freed_memory

getattr(freed_memory, sys.argv[1])()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytes(3 << 20) + b"." for _ in range(20)]
    del blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""
SECOND_ROUND = 20 * (3 << 20) // os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def faults(function, **environment):
    unchanged = {name: value for name, value in os.environ.items() if name not in freed_memory.SETTINGS}
    command = [sys.executable, "-c", FAULTS, function]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=unchanged | environment)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_freed_memory_is_kept_or_returned_unless_the_environment_chooses():
    assert faults("keep_freed_memory") < SECOND_ROUND / 10
    assert faults("return_freed_memory") >= SECOND_ROUND
    assert faults("keep_freed_memory", MALLOC_MMAP_THRESHOLD_="65536") >= SECOND_ROUND


def test_large_results_of_kernels_are_kept(monkeypatch):
    fresh, shape = [], torch.Size((300 << 20,))
    results = OutputMemory(on_new=lambda block: fresh.append(block.nbytes))
    monkeypatch.setattr(freed_memory, "_set_parameters", lambda _: None)
    monkeypatch.setattr(freed_memory, "RESULTS", results)
    for _ in range(2):
        results.empty(shape, torch.uint8)
    assert len(fresh) == 2
    freed_memory.keep_freed_memory()
    for _ in range(2):
        results.empty(shape, torch.uint8)
    assert len(fresh) == 3
