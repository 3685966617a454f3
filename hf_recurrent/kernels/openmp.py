"""Calls of compiled kernels on the threads that torch itself computes with.

After an operation, the threads of OpenMP wait in a loop for the next one: milliseconds, unless `GOMP_SPINCOUNT` is
small, as it is in `hf-recurrent`. Threads of our own would share the cores with that loop. So a kernel runs on the
same threads, by the function that compilers call for a parallel region. Where the OpenMP library has no such function,
as on macOS, it runs on one thread.
"""

import ctypes
from collections.abc import Callable

import torch  # noqa: F401  (loads the library)

try:
    _openmp = ctypes.CDLL(None)
    _parallel = _openmp.GOMP_parallel
    _parallel.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint)
    _parallel.restype = None
    # Addresses of the functions that tell a kernel's `own_part` the number of its thread, and of all that came.
    TEAM = tuple(
        ctypes.cast(function, ctypes.c_void_p).value
        for function in (_openmp.omp_get_thread_num, _openmp.omp_get_num_threads)
    )
    BARRIER = ctypes.cast(_openmp.GOMP_barrier, ctypes.c_void_p).value  # of a team
except (AttributeError, OSError, TypeError):  # no such function; no such library; Windows
    _parallel, TEAM, BARRIER = None, (0, 0), 0


def call_on_threads(function: Callable[[bytes], None], argument: bytes, threads: int) -> None:
    """Call a kernel's `function(argument)` on up to `threads` threads at once; each takes its own part of the work.

    Args:
        function: of a library loaded with ctypes; it divides the work by `own_part` of kernel.h.
        argument: its packed struct, which includes `TEAM`.
        threads: 1 calls it directly.
    """
    if _parallel is None or threads == 1:
        function(argument)
    else:
        _parallel(function, argument, threads, 0)
