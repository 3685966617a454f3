"""One byte of every stream without gradients, faster than plain `forward` and with the same numbers.

On a CPU it is one call of a compiled kernel ([`CompiledStep`]), on a GPU one CUDA graph ([`CapturedStep`]). Where
these do not support a module, hook or type, plain `forward` runs. Any number of threads may use one model.

Shape letters: B streams, M model width.
"""

import threading
from collections.abc import Hashable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .captured_step import CapturedStep
from .compiled_step import CompiledStep
from .module_watch import ModuleWatch
from .recurrent_state import RecurrentState

_STEP_CLASSES: dict[str, type[CompiledStep | CapturedStep]] = {"cpu": CompiledStep, "cuda": CapturedStep}
# Of one model; each graph keeps memory on its device.
_MOST_STEPS = 16


class _ModelSteps(NamedTuple):
    watch: ModuleWatch
    steps: dict[Hashable, CompiledStep | CapturedStep]  # by class and key of the inputs


# Outside of the models, so that these can be copied, saved and sent.
_steps: WeakKeyDictionary[nn.Module, _ModelSteps] = WeakKeyDictionary()
_changing = threading.Lock()  # held to change the above, never while a step runs


def run_single_step(
    model: nn.Module, hidden: torch.Tensor, state: RecurrentState
) -> tuple[torch.Tensor, RecurrentState] | None:
    """Read one byte of every stream, without gradients.

    Args:
        model: has `layers`, a final `norm`, and `read_layers`, which runs them.
        hidden: (B, 1, M), the embedded bytes.
        state: of these streams.

    Returns:
        The output after the final norm (B, 1, M) and the new state, or None where plain `forward` has to run.
    """
    step = find_single_step(model, hidden)
    return None if step is None else step.run(model, hidden, state)


def find_single_step(model: nn.Module, hidden: torch.Tensor) -> CompiledStep | CapturedStep | None:
    """The fast step of `model` as it is now, for inputs like `hidden` (B, 1, M), or None."""
    step_class = _STEP_CLASSES.get(hidden.device.type)
    if (
        step_class is None
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or type(hidden) is not torch.Tensor
        or torch.is_autocast_enabled(hidden.device.type)
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or not step_class.is_supported(hidden)
    ):
        return None
    found = _steps.get(model)
    if found is None or not found.watch.unchanged():
        found = _ModelSteps(ModuleWatch(model), {})
        with _changing:
            _steps[model] = found
    if found.watch.overridden:
        return None
    return found.steps.get(key := (step_class, step_class.key(hidden))) or _add_step(found, key, model, hidden)


def _add_step(found: _ModelSteps, key: tuple, model: nn.Module, hidden: torch.Tensor) -> CompiledStep | CapturedStep:
    with _changing:
        if key not in found.steps:  # another thread may have been faster
            if len(found.steps) == _MOST_STEPS:
                del found.steps[next(iter(found.steps))]
            found.steps[key] = key[0](model, hidden)
        return found.steps[key]
