"""Learning rules on a model without values: a unit that they run once to examine it is a copy with values."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hf_recurrent.learning_rules import sensitivities
from hf_recurrent.learning_rules.snap1 import diagonal_recurrence
from hf_recurrent.learning_rules.traced_unit import TracedUnit, find_traced_parameters
from hf_recurrent.modeling.units.recurrent_unit import RecurrentUnit


@contextmanager
def probes_with_values() -> Iterator[None]:
    """Inside the block, `SensitivityEngine` can be built and run on a model whose tensors have no values.

    Its compiled kernel, which needs addresses, is not used.
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
    if twin.__dict__.pop("recur", None) is not None:  # that of SnAp-1, a function of the unit without values
        twin.recur = diagonal_recurrence(twin)
    return twin


def _values(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(0)) / 10
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
