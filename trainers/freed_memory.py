"""Memory that is freed returns to the system at once, instead of staying in the heap of the C library."""

import ctypes
import os
import sys

_M_MMAP_THRESHOLD = -3  # in glibc's malloc.h
_SMALLEST = 1 << 20  # bytes of a block that is mapped and unmapped on its own
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def return_freed_memory() -> None:
    """Let the C library return every block of 1 MiB or more to the system when it is freed.

    glibc raises this size to that of the largest block that was ever freed, up to 32 MiB. A sharded model gathers and
    frees the weights of its layers all the time, and the holes that they leave took 0.8 of 3.2 GB of a process that
    trains Memora-S6. No-op where the C library is another one, and where the user has chosen the allocator.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _SETTINGS):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _SMALLEST)
