"""Freed memory: returned to the system at once, or kept for the next step.

The C library is left alone where it is not glibc, and where the user has chosen the allocator or its parameters.
"""

import ctypes
import os
import sys

from hf_recurrent.kernels.output_memory import RESULTS

# In glibc's malloc.h, and the largest values that it accepts.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT, _MOST_KEPT = 1 << 25, (1 << 31) - 1
_SMALLEST = 1 << 20  # bytes of a block that is mapped and unmapped on its own
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def return_freed_memory() -> None:
    """Let the C library return every block of 1 MiB or more to the system when it is freed.

    glibc raises this size to the largest block that was ever freed, up to 32 MiB. A sharded model gathers and
    frees the weights of its layers all the time, and the holes that they leave took 0.8 of 3.2 GB of a process that
    trains Memora-S6.
    """
    _set_parameters({_M_MMAP_THRESHOLD: _SMALLEST})


def keep_freed_memory() -> None:
    """Keep up to 2 GiB of freed memory: the C library of blocks of up to 32 MiB at its heap's end, and the kernels.

    Otherwise most of it returns to the system. Gradients and activations are freed in every step, and the
    next step would get their memory back page by page, zeroed: a tenth of the time of a step of RTRL with 64 streams.
    """
    RESULTS.kept = _MOST_KEPT
    _set_parameters({_M_MMAP_THRESHOLD: _LARGEST_KEPT, _M_TRIM_THRESHOLD: _MOST_KEPT})


def _set_parameters(parameters: dict[int, int]) -> None:
    if not sys.platform.startswith("linux") or any(name in os.environ for name in SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in parameters.items():
            mallopt(parameter, value)
