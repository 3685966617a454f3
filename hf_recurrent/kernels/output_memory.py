"""Reuse of the memory of large results.

The operating system provides fresh memory page by page, zeroed: for tensors of tens of megabytes that takes longer
than computing what goes into them, and torch's CPU allocator returns such memory at once. Here a tensor's memory is
reused by a later tensor of about the same size.
"""

import ctypes
import itertools
import mmap
import weakref
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 1 << 20  # bytes; malloc keeps smaller ones by itself
_KEPT = 1 << 28  # bytes that may lie unused
_UNIT = 1 << 20  # sizes are rounded up to this
_ROOM = 1.125  # of a block over what its tensor needs, and of all blocks over what was in use at once


class OutputMemory:
    """Uninitialised CPU tensors, whose memory returns here when the last tensor that shares it is gone.

    Args:
        on_new: called with every block of fresh memory, a tensor of bytes.
        kept: at most this many bytes lie unused; the oldest blocks go first. Used and unused blocks together have at
            most an eighth more than was ever in use at once.
    """

    def __init__(self, on_new: Callable[[Tensor], object], kept: int = _KEPT):
        self._on_new, self._kept, self._most_used = on_new, kept, 0
        self._used: dict[int, tuple[weakref.ref[np.ndarray], Tensor]] = {}
        self._free: dict[int, Tensor] = {}  # the oldest first; every change is atomic
        self._numbers = itertools.count()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of that shape and type."""
        size = shape.numel() * dtype.itemsize
        if size < _SMALLEST:
            return torch.empty(shape, dtype=dtype, device="cpu")
        block = self._take(-(-size // _UNIT) * _UNIT)
        array = block.numpy()  # owned by the tensor's storage, so that both end together
        reference = weakref.ref(array, self._give_back)
        self._used[id(reference)] = reference, block  # an array has no hash, and so has no reference to it
        self._most_used = max(self._most_used, self.used_bytes())
        # set_, because a view would be a view to autograd too.
        return torch.empty(0, dtype=dtype, device="cpu").set_(torch.from_numpy(array).untyped_storage(), 0, shape)

    def unused_bytes(self) -> int:
        return sum(block.nbytes for block in tuple(self._free.values()))

    def used_bytes(self) -> int:
        return sum(block.nbytes for _, block in tuple(self._used.values()))

    def _take(self, size: int) -> Tensor:
        fitting = [each for each in self._free.copy().items() if size <= each[1].nbytes <= _ROOM * size]
        for number, block in sorted(fitting, key=lambda each: (each[1].nbytes, -each[0])):  # the smallest, then newest
            if self._free.pop(number, None) is not None:  # else another thread took it
                return block
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._on_new(block)
        return block

    def _give_back(self, reference: weakref.ref) -> None:
        _, self._free[next(self._numbers)] = self._used.pop(id(reference))
        excess = self.unused_bytes() - min(self._kept, _ROOM * self._most_used - self.used_bytes())
        for number, block in tuple(self._free.items()):
            if excess <= 0:
                break
            if self._free.pop(number, None) is not None:
                excess -= block.nbytes


def use_large_pages(block: Tensor) -> None:
    """Ask for large pages for fresh memory, where the system has them: a tenth of the time goes into providing it."""
    page = 1 << 21
    first, stop = -(-block.data_ptr() // page) * page, (block.data_ptr() + block.nbytes) // page * page
    if _madvise is not None and stop > first:
        _madvise(first, stop - first, mmap.MADV_HUGEPAGE)


try:
    _madvise = ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_HUGEPAGE") else None
except (AttributeError, OSError, TypeError):  # no such function; no such library; Windows
    _madvise = None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

RESULTS = OutputMemory(on_new=use_large_pages)  # of all kernels
