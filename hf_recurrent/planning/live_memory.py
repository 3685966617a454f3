"""Bytes of the tensors that are alive, and their peak, while operations run without memory and without arithmetic."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveMemory(TorchDispatchMode):
    """Counts every storage once, from the operation that makes it until the last tensor on it is gone.

    Autograd runs as usual under it, so that what the backward pass needs is alive until it was used.

    Attributes:
        now: bytes that are alive.
        peak: the most so far.
        gradients: bytes of the parameters' gradients that are alive, as a caller counts them.
        peak_gradients: those at the peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.gradients = self.peak_gradients = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        results = operation(*arguments, **(options or {}))
        tree_map_only(torch.Tensor, self._note, results)
        return results

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            if self.now > self.peak:
                self.peak, self.peak_gradients = self.now, self.gradients
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, address: int) -> None:
        self.now -= self._known.pop(address)


@contextmanager
def imagined_memory() -> Iterator[LiveMemory]:
    """Inside the block, tensors have shapes and types but no memory, and those that are alive are counted."""
    with FakeTensorMode(allow_non_fake_inputs=True), LiveMemory() as memory:
        yield memory
