"""The threads that all kernels share; a kernel's library is given them by [`use_pool`].

They are a pool of `thread_pool_cpu.c`, asleep between calls. After an operation of torch, OpenMP's threads wait
in a loop for the next one: for milliseconds, unless `GOMP_SPINCOUNT` is small, as it is in `hf-recurrent`. Threads of
our own would share the cores with that loop, so where it is long, kernels run on OpenMP's threads.
"""

import ctypes
import os

import torch  # noqa: F401  (loads the library of OpenMP)

from .compiled import load_library

_VERSION = 1  # of thread_pool_cpu.c
_SHORT_SPIN = 10_000  # rounds of OpenMP's loop: tens of microseconds

_library = load_library("_thread_pool_cpu", "hf_pool_version", _VERSION)
_library.hf_pool_use_team.argtypes, _library.hf_pool_use_team.restype = (ctypes.c_void_p,), None
_share = ctypes.cast(_library.hf_pool_share, ctypes.c_void_p).value


def use_pool(library: ctypes.CDLL, name: str) -> None:
    """Give a kernel's library, which exports `hf_{name}_use_pool`, the threads."""
    function = getattr(library, f"hf_{name}_use_pool")
    function.argtypes, function.restype = (ctypes.c_void_p,), None
    function(_share)


def team_address() -> int | None:
    """The address of OpenMP's function for a parallel region; None if its library has no such function."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):  # no such function; no such library; Windows
        return None


def use_team(is_used: bool) -> None:
    """Run kernels on OpenMP's threads from now on, if possible, or on the pool's."""
    _library.hf_pool_use_team(team_address() if is_used else None)


def openmp_waits_long() -> bool:
    """True where OpenMP's threads wait in a loop that is long, by the variables that its library reads."""
    spins = os.environ.get("GOMP_SPINCOUNT", "").strip()
    if spins.isdecimal():
        return int(spins) > _SHORT_SPIN
    return os.environ.get("OMP_WAIT_POLICY", "").strip().lower() != "passive"


use_team(openmp_waits_long())
