"""One token of every stream without gradients, faster than plain `forward` and with the same numbers.

On a CPU it is one call of a compiled kernel ([`CompiledStep`]), on a GPU one CUDA graph ([`CapturedStep`]). Where
these do not support an operation, hook or type, plain `forward` runs. Any number of threads may use one model.

Shape letters: B streams, M model width.
"""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..block.recurrent_state import RecurrentState
from ..block.tensor_checks import is_compiling, transforms_active
from .captured_step import CapturedStep
from .compiled_step import WEIGHT_TYPES, CompiledStep, kernel_for
from .module_watch import ModuleWatch, StepLoop

_STEP_CLASSES: dict[str, type[CompiledStep | CapturedStep]] = {"cpu": CompiledStep, "cuda": CapturedStep}
# The short ways to answers that the weights have displaced from the caches, at every step.
_is_grad_enabled, _is_autocast_used = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
_tracing_state, _dispatch_modes = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
# Of one model; each graph keeps memory on its device.
_MOST_STEPS = 16


class _ModelSteps(NamedTuple):
    watch: ModuleWatch
    steps: dict[Hashable, CompiledStep | CapturedStep]  # by class and key of the inputs


# Outside of the models, so that these can be copied, saved and sent.
_steps: WeakKeyDictionary[nn.Module, _ModelSteps] = WeakKeyDictionary()
_weights: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # types chosen by `compile_step`
_changing = threading.Lock()  # held to change the above, never while a step runs
_plain = threading.local()


@contextmanager
def plain_forward() -> Iterator[None]:
    """Inside the block, this thread runs no fast step: one is being made, or weights change too often for it."""
    before, _plain.on = getattr(_plain, "on", False), True
    try:
        yield
    finally:
        _plain.on = before


def run_single_step(
    model: nn.Module, inputs: Tensor, state: RecurrentState, loop: StepLoop | None = None
) -> tuple[Tensor, RecurrentState] | None:
    """Read one token of every stream, without gradients: a backbone reads embeddings (B, 1, M), a language model ids.

    Returns the output after the final norm (B, 1, M) or the logits (B, 1, V), and the new state, or None where plain
    `forward` has to run.
    """
    step = find_single_step(model, inputs, loop)
    return None if step is None else step.run(model, inputs, state)


def find_single_step(
    model: nn.Module, inputs: Tensor, loop: StepLoop | None = None
) -> CompiledStep | CapturedStep | None:
    """The fast step of `model` as it is now, for inputs like `inputs`, or None.

    With a `loop` it may be the step of the model as it was within the last 64 steps of that loop.
    """
    device = "cpu" if inputs.is_cpu else inputs.device.type
    step_class = _STEP_CLASSES.get(device)
    if (
        step_class is None
        or _is_grad_enabled()
        or is_compiling()
        or type(inputs) is not Tensor
        or (_is_autocast_used() and torch.is_autocast_enabled(device))
        or _tracing_state()
        or transforms_active()
        or _dispatch_modes()
        or getattr(_plain, "on", False)
        or not step_class.accepts(inputs)
    ):
        return None
    found = _steps.get(model)
    if found is None or not (found.watch.unchanged() if loop is None else loop.unchanged(found.watch)):
        if not step_class.is_supported(model, inputs):
            return None
        found = _ModelSteps(ModuleWatch(model), {})
        with _changing:
            _steps[model] = found
    if found.watch.overridden:
        return None
    step = found.steps.get(key := (step_class, step_class.key(inputs)))
    if step is None and step_class.is_supported(model, inputs):
        step = _add_step(found, key, model, inputs)
    return step


def choose_step_weights(model: nn.Module, weights: str | None) -> None:
    """Store the weights of a language model's compiled step in another type; None for the model's.

    Raises:
        ValueError: the type is unknown, or the step cannot be compiled.
        RuntimeError: the kernel was not built, or the model is not float32 on the CPU.
    """
    if weights is not None and weights not in WEIGHT_TYPES:
        raise ValueError(f"`weights` is {weights!r}; it must be one of {', '.join(map(repr, WEIGHT_TYPES))}, or None.")
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    if weights is not None and (model.dtype != torch.float32 or model.device.type != "cpu"):
        raise RuntimeError(f"The model is {model.dtype} on {model.device}; `compile_step` needs float32 on the CPU.")
    if kernel_for(model.dtype) is None:
        raise RuntimeError("The compiled step is not available: the kernel was not built, or not for this type.")
    with _changing:
        _steps.pop(model, None)
        if weights is None:
            _weights.pop(model, None)
        else:
            _weights[model] = weights
    with torch.no_grad():
        step = find_single_step(model, ids)
    if step is None or step.program is None:
        with _changing:
            _weights.pop(model, None)
            _steps.pop(model, None)
        problem = "a hook or another `forward` is in its place" if step is None else step.problem
        raise ValueError(f"The step of {type(model).__name__} cannot be compiled: {problem}.")


def _add_step(found: _ModelSteps, key: tuple, model: nn.Module, inputs: Tensor) -> CompiledStep | CapturedStep:
    with _changing:
        if key not in found.steps:  # another thread may have been faster
            if len(found.steps) == _MOST_STEPS:
                del found.steps[next(iter(found.steps))]
            with plain_forward():
                found.steps[key] = key[0](model, inputs, _weights.get(model))
        return found.steps[key]
