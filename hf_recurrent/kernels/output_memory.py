"""Reuse of the memory of large results.

The operating system provides fresh memory page by page, zeroed: for tensors of tens of megabytes that takes longer
than computing what goes into them, and torch's CPU allocator returns such memory at once. Here a tensor's memory is
reused by a later tensor of about the same size.
"""

import ctypes
import itertools
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 1 << 18  # bytes; malloc keeps smaller ones by itself
_KEPT = 1 << 28  # bytes that may lie unused
_ROOM = 1.125  # of all blocks over what was in use at once
_NUMBER_TYPES = {torch.float32: np.float32, torch.float64: np.float64}  # others take a longer way
_simulated = ContextVar("simulated_kernels", default=False)


@contextmanager
def simulated_kernels() -> Iterator[None]:
    """Inside the block, training kernels take fake tensors and compute nothing, for counts of their memory."""
    token = _simulated.set(True)
    try:
        yield
    finally:
        _simulated.reset(token)


def is_simulated() -> bool:
    """True inside [`simulated_kernels`]."""
    return _simulated.get()


def _block_bytes(size: int) -> int:
    """The size of a block for `size` bytes: at most an eighth more, so that few sizes serve all tensors."""
    unit = 1 << (size.bit_length() - 4)
    return -(-size // unit) * unit


class OutputMemory:
    """Uninitialised CPU tensors, whose memory returns here when the last tensor that shares it is gone.

    Args:
        on_new: called with every block of fresh memory, a tensor of bytes.
        kept: at most this many bytes lie unused; may be changed. The oldest blocks go first. Used and unused blocks
            together have at most an eighth more than was ever in use at once.
    """

    def __init__(self, on_new: Callable[[Tensor], object], kept: int = _KEPT):
        self.kept, self._on_new = kept, on_new
        self._used_bytes = self._unused_bytes = self._most_used = 0
        self._used: dict[int, tuple[weakref.ref[np.ndarray], np.ndarray]] = {}
        self._free: dict[int, np.ndarray] = {}  # by number; the oldest first
        self._numbers_of: defaultdict[int, list[int]] = defaultdict(list)  # by size; some are gone
        self._numbers = itertools.count()
        # The garbage collector may give blocks back in any thread, also in one that is in here.
        self._lock = threading.RLock()

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of that shape and type."""
        size = shape.numel() * dtype.itemsize
        if size < _SMALLEST:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if is_simulated():  # with its share of what lies unused
            elements = int(_ROOM * _block_bytes(size)) // dtype.itemsize
            return torch.empty(elements, dtype=dtype, device="cpu")[: shape.numel()].view(shape)
        number_type = _NUMBER_TYPES.get(dtype)
        with self._lock:
            block = self._take(_block_bytes(size))
            # An array of its own for each tensor, owned by the tensor's storage, so that both end together.
            array = block[:size] if number_type is None else np.ndarray(shape, number_type, block)
            reference = weakref.ref(array, self._give_back)
            self._used[id(reference)] = reference, block  # an array has no hash, and so has no reference to it
            self._used_bytes += block.nbytes
            self._most_used = max(self._most_used, self._used_bytes)
        tensor = torch.from_numpy(array)
        if number_type is not None:
            return tensor
        # set_, because a view would be a view to autograd too.
        return torch.empty(0, dtype=dtype, device="cpu").set_(tensor.untyped_storage(), 0, shape)

    def _take(self, size: int) -> np.ndarray:
        """A block of bytes; the lock is held."""
        numbers = self._numbers_of[size]
        while numbers:
            block = self._free.pop(numbers.pop(), None)
            if block is not None:
                self._unused_bytes -= size
                return block
        block = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._on_new(block)
        return block.numpy()

    def _give_back(self, reference: weakref.ref) -> None:
        with self._lock:
            _, block = self._used.pop(id(reference))
            number = next(self._numbers)
            self._free[number] = block
            self._numbers_of[block.nbytes].append(number)
            self._used_bytes -= block.nbytes
            self._unused_bytes += block.nbytes
            most = min(self.kept, _ROOM * self._most_used - self._used_bytes)
            while self._unused_bytes > most and self._free:
                oldest = self._free.pop(next(iter(self._free)), None)
                self._unused_bytes -= 0 if oldest is None else oldest.nbytes


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
