"""One byte of few streams as one call of the compiled kernel: one pass over the weights.

Layers describe one step of their `forward` in `compile_step`, as operations of the kernel. Without the kernel or such
a description, plain `forward` runs.

Shape letters: B streams, M model width.
"""

import importlib
import math
from functools import cache
from types import ModuleType

import torch
from torch import nn
from transformers.utils import logging

from .module_watch import is_plain_module
from .recurrent_blocks import TemporalConvolution
from .recurrent_state import RecurrentState

logger = logging.get_logger(__name__)

# With more streams, the matrix products of torch, which read the weights less often, make up for its many calls.
_MOST_STREAMS = 24
# Larger weights are read faster by several threads, and the kernel is one.
_MOST_SHARED_BYTES = 1 << 26


class NotCompilable(Exception):
    """A module has no form as operations of the kernel."""


@cache
def _kernel() -> ModuleType | None:
    try:
        return importlib.import_module("hf_recurrent.kernels.step_cpu")
    except ImportError:
        return None


class StepCompiler:
    """Writes one step of a model as a program of the kernel; layers use it in `compile_step`.

    Args:
        hidden: (B, 1, M), embedded bytes.
        state_shapes: of the model's state.
    """

    def __init__(self, hidden: torch.Tensor, state_shapes: dict[str, torch.Size]):
        self.program = program = _kernel().StepProgram(hidden.dtype)
        self.hidden = _kernel().Vector(hidden.shape[-1], "hidden")
        self.state_shapes, self.layer = state_shapes, 0
        self.layer_norm, self.gelu, self.multiply = program.layer_norm, program.gelu, program.multiply

    def begin_layer(self, number: int) -> None:
        """From here on, states are those of this layer."""
        self.layer = number
        self.program.begin_layer()

    def module(self, module: nn.Module, *operands):
        """One step of a module whose own class has `compile_step`; a subclass may compute something else."""
        if "compile_step" not in vars(type(module)):
            raise NotCompilable(type(module).__name__)
        return module.compile_step(self, *operands)

    def linear(self, module: nn.Linear, x, onto=None):
        """`module(x)`, added to `onto` if that is given."""
        if type(module).forward is not nn.Linear.forward or module.bias is not None:
            raise NotCompilable(type(module).__name__)
        return self.program.linear(self._weight(module.weight, 2), x, onto)

    def contract(self, module: nn.Linear, x, onto, eps: float | None = None) -> None:
        """`module(x)` added to `onto`, with a LayerNorm between if there is an `eps`."""
        if eps is None:
            self.linear(module, x, onto)
        else:
            self.program.add(onto, self.layer_norm(self.linear(module, x), eps))

    def gated_norm(self, gate, value, eps: float):
        """[`gated_norm`] of the two."""
        gate = self.gelu(self.layer_norm(gate, eps))
        return self.layer_norm(self.multiply(gate, self.layer_norm(value, eps)), eps)

    def rms_norm(self, module: nn.RMSNorm, x, to=None):
        """`module(x)`, written to `to` if that is given."""
        if type(module) is not nn.RMSNorm or module.eps is None or module.normalized_shape != (x.width,):
            raise NotCompilable(type(module).__name__)
        weight = None if module.weight is None else self._weight(module.weight, 1)
        return self.program.rms_norm(x, weight, module.eps, to)

    def convolution(self, module: TemporalConvolution, x):
        """The output of a convolution whose taps are the part `convolution` of the state."""
        if type(module) is not TemporalConvolution or module.kernel_size != len(module.weight):
            raise NotCompilable(type(module).__name__)
        taps, new_taps = self._state("convolution", module.kernel_size - 1, x.width)
        return self.program.convolution(x, taps, self._weight(module.weight, 2), new_taps)

    def gated_unit(self, name: str, unit: nn.Module, recurrence_gate, input_gate, projection, rate: nn.Parameter):
        """The element-wise step of a gated unit, whose state is the part `recurrent`; the new state is its output."""
        state, new_state = self._state("recurrent", projection.width)
        options = {
            "scale": unit.decay_scale,
            "negative": unit.allow_negative_eigenvalues,
            "rate": self._weight(rate, 1),
        }
        operands = (recurrence_gate, input_gate, projection, state)
        return self.program.gated_unit(name, new_state, *operands, **options)

    def _state(self, part: str, *shape: int) -> tuple:
        """A part of the layer's state before and after the step."""
        name = f"layers.{self.layer}.{part}"
        if self.state_shapes[name][1:] != shape:
            raise NotCompilable(f"{name} of shape {shape}")
        width = math.prod(shape)
        return _kernel().Vector(width, name), _kernel().Vector(width, name, is_new=True)

    def _weight(self, parameter: torch.Tensor, dimensions: int) -> torch.Tensor:
        if type(parameter) is not nn.Parameter or parameter.dim() != dimensions:
            raise NotCompilable(f"{type(parameter).__name__} of {dimensions} dimensions")
        return parameter.detach()  # the program checks that it can read it


class CompiledStep:
    """The step of one model as a program of the kernel, which any number of threads may run at once."""

    def __init__(self, model: nn.Module, hidden: torch.Tensor):
        self.dtype = hidden.dtype
        self.bytes_read = sum(parameter.nbytes for parameter in model.parameters())
        self.state_shapes = [model.state_shapes(batch_size) for batch_size in range(_MOST_STREAMS + 1)]
        compiler = StepCompiler(hidden, self.state_shapes[1])
        self.program = compiler.program
        try:
            for number, layer in enumerate(model.layers):
                compiler.begin_layer(number)
                compiler.module(layer, compiler.hidden)
            compiler.rms_norm(model.norm, compiler.hidden, to=compiler.hidden)
        except (NotCompilable, _kernel().UnreadableTensor):
            self.program = None
            if foreign := next((m for m in model.layers.modules() if not is_plain_module(m)), None):
                logger.warning_once(
                    f"Single bytes run without the compiled step, several times slower, because of a module "
                    f"`{type(foreign).__module__}.{type(foreign).__name__}`. Adapters: `merge_and_unload()` first."
                )

    @staticmethod
    def is_supported(hidden: torch.Tensor) -> bool:
        """True where such a step can be compiled here."""
        return hidden.shape[0] <= _MOST_STREAMS and _kernel() is not None and _kernel().is_supported(hidden.dtype)

    @staticmethod
    def key(hidden: torch.Tensor) -> torch.dtype:
        """Inputs with the same key share a program."""
        return hidden.dtype

    def run(
        self, model: nn.Module, hidden: torch.Tensor, state: RecurrentState
    ) -> tuple[torch.Tensor, RecurrentState] | None:
        """See [`run_single_step`]."""
        if self.program is None or (torch.get_num_threads() > 2 and self.bytes_read > _MOST_SHARED_BYTES):
            return None
        batch_size = hidden.shape[0]
        shapes = self.state_shapes[batch_size]
        if type(state) is not dict or state.keys() != shapes.keys():
            return None
        for name, shape in shapes.items():
            if getattr(state[name], "shape", None) != shape:
                return None
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        try:
            new = self.program.run({"hidden": hidden, **state}, batch_size)
        except _kernel().UnreadableTensor:  # plain `forward` reads it, or names it
            return None
        return hidden, {name: new[name] for name in state}

    def run_chain(self, hidden: torch.Tensor, state: RecurrentState) -> tuple[torch.Tensor, RecurrentState] | None:
        """T successive bytes of one stream, at the cost of T streams, with the bits of single steps.

        Args:
            hidden: (1, T, M), the embedded bytes.
            state: of this stream.

        Returns:
            The outputs after the final norm (1, T, M) and the states before the first byte and after each, (T + 1, …),
            or None where plain `forward` has to run.
        """
        shapes = self.state_shapes[1]
        if self.program is None or hidden.shape[0] != 1 or type(state) is not dict or state.keys() != shapes.keys():
            return None
        if any(getattr(state[name], "shape", None) != shape for name, shape in shapes.items()):
            return None
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        try:
            states = self.program.run_chain({"hidden": hidden[0]}, state, hidden.shape[1])
        except _kernel().UnreadableTensor:
            return None
        return hidden, states
