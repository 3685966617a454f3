"""Training on fake tensors, which have shapes and types but no memory: live bytes and their peak are counted."""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from hf_recurrent.learning_rules import sensitivities
from hf_recurrent.learning_rules.snap1 import diagonal_recurrence
from hf_recurrent.learning_rules.traced_unit import TracedUnit, find_traced_parameters
from hf_recurrent.modeling.units.recurrent_unit import RecurrentUnit


class LiveMemory(TorchDispatchMode):
    """Counts every storage once, from the operation that makes it until the last tensor on it is gone.

    Autograd runs as usual under it, so that what the backward pass needs is alive until it was used.

    `now` and `peak` are live bytes; `gradients` are bytes that the caller counts, `peak_gradients` their number at the
    peak.
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
        if tensor.is_sparse:  # its rows and values are counted
            return
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
def fake_memory() -> Iterator[LiveMemory]:
    """Inside the block, tensors are fake, and live ones are counted."""
    with FakeTensorMode(allow_non_fake_inputs=True), LiveMemory() as memory:
        yield memory


@contextmanager
def probes_with_values() -> Iterator[None]:
    """Inside the block, `SensitivityEngine` works on a model of fake tensors.

    A unit that it runs once to examine it is a copy with values; its compiled kernel, which needs addresses, is not
    used.
    """
    before = sensitivities.find_traced_parameters, sensitivities.sensitivities_cpu
    sensitivities.find_traced_parameters, sensitivities.sensitivities_cpu = _find_by_copy, None
    try:
        yield
    finally:
        sensitivities.find_traced_parameters, sensitivities.sensitivities_cpu = before


def _find_by_copy(name: str, unit: RecurrentUnit, dtype: torch.dtype) -> TracedUnit:
    with _disable_current_modes():
        found = find_traced_parameters(name, _copy_with_values(unit), dtype)
    own = dict(unit.named_parameters(recurse=False))
    linears = {child: getattr(unit, child) for child in found.linears}
    return TracedUnit(name, unit, linears, {vector: own[vector] for vector in found.vectors})


def _copy_with_values(unit: RecurrentUnit) -> RecurrentUnit:
    tensors = (*unit.parameters(), *unit.buffers())
    twin = copy.deepcopy(unit, {id(tensor): _values(tensor) for tensor in tensors})
    if twin.__dict__.pop("recur", None) is not None:  # added by SnAp-1, a function of the fake unit
        twin.recur = diagonal_recurrence(twin)
    return twin


def _values(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(0)) / 10
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
