"""Freed memory returns to the system or is kept, in processes of their own."""

import os
import platform
import subprocess
import sys

import pytest

from hf_recurrent.trainers import freed_memory

# Page faults of the second of two equal rounds of allocations, whose blocks are freed together.
FAULTS = """
import importlib.util, resource, sys

spec = importlib.util.spec_from_file_location("freed_memory", sys.argv[1])  # without torch
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
getattr(module, sys.argv[2], lambda: None)()
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
    command = [sys.executable, "-c", FAULTS, freed_memory.__file__, function]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=unchanged | environment)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one")
def test_freed_memory_is_kept_or_returned_unless_the_environment_chooses():
    assert faults("keep_freed_memory") < SECOND_ROUND / 10
    assert faults("return_freed_memory") >= SECOND_ROUND
    assert faults("keep_freed_memory", MALLOC_MMAP_THRESHOLD_="65536") >= SECOND_ROUND
