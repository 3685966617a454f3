"""Number of threads that kernels use on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_own_threads: int | None = None
_others = 0


def num_threads() -> int:
    """Threads of kernels: as many as torch's, unless they have been given their own number."""
    return _own_threads or torch.get_num_threads()


def free_threads() -> int:
    """Threads that a kernel may use now: [`num_threads`] without those in [`beside_kernels`], at least one."""
    return max(1, num_threads() - _others)


@contextmanager
def beside_kernels() -> Iterator[None]:
    """For a thread that computes next to kernels: inside the block, they leave it a core."""
    global _others
    _others += 1
    try:
        yield
    finally:
        _others -= 1


@contextmanager
def threads_for_kernels() -> Iterator[None]:
    """Inside the block, kernels use torch's number of threads, and torch itself one.

    For steps that are kernels in the main. Their small operations of torch take as long with one thread, and on busy
    cores threads of OpenMP would wait for each other. Results no longer depend on the number of threads.
    """
    global _own_threads
    own, of_torch = _own_threads, torch.get_num_threads()
    if own is not None:
        yield
        return
    _own_threads = of_torch
    torch.set_num_threads(1)
    try:
        yield
    finally:
        _own_threads = None
        torch.set_num_threads(of_torch)
