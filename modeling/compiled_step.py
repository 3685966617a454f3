"""One byte of few streams as one call of the compiled kernel: one pass over the weights.

Layers describe one step of their `forward` in `compile_step`, as operations of the kernel. Where the kernel is
missing, or a module or type is not what it knows, `forward` runs as it stands.

Shape letters: B streams, M model width, S state width, N layers.
"""

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import nn

from .module_watch import ModuleWatch
from .recurrent_state import RecurrentState

# With more streams, the matrix products of torch, which read the weights less often, make up for its many calls.
_MOST_STREAMS = 24
# Larger weights are faster read by several threads, and the kernel is one.
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
    """What a layer writes its step with: the kernel's operations, on the parameters of modules.

    Args:
        program: the kernel's list.
    """

    def __init__(self, program):
        self.program = program
        self.layer = 0
        self.layer_norm, self.gelu, self.multiply = program.layer_norm, program.gelu, program.multiply

    def begin_layer(self, number: int) -> None:
        """Names of states are those of this layer from here on."""
        self.layer = number
        self.program.begin_layer()

    def state(self, part: str) -> str:
        """The state before the step."""
        return f"layers.{self.layer}.{part}"

    def new_state(self, part: str) -> str:
        """The state after the step."""
        return f"new layers.{self.layer}.{part}"

    def linear(self, module: nn.Linear, x, onto=None):
        """`module(x)`, added to `onto` if that is given."""
        if type(module).forward is not nn.Linear.forward or module.bias is not None:
            raise NotCompilable(type(module).__name__)
        return self.program.linear(self.tensor(module.weight), x, onto)

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
        if type(module) is not nn.RMSNorm or module.eps is None:
            raise NotCompilable(type(module).__name__)
        weight = None if module.weight is None else self.tensor(module.weight)
        return self.program.rms_norm(x, module.normalized_shape[0], weight, module.eps, to)

    def convolution(self, module: nn.Module, x):
        """The output of a [`TemporalConvolution`], whose taps are the part `convolution` of the state."""
        weight = self.tensor(module.weight)
        return self.program.convolution(x, self.state("convolution"), weight, self.new_state("convolution"))

    def gated_unit(self, name: str, unit: nn.Module, recurrence_gate, input_gate, projection, rate: nn.Parameter):
        """The element-wise step of a gated unit, whose state is the part `recurrent`; the new state is its output."""
        return getattr(self.program, name)(
            self.new_state("recurrent"),
            recurrence_gate,
            input_gate,
            projection,
            self.state("recurrent"),
            self.tensor(rate),
            unit.decay_scale,
            unit.allow_negative_eigenvalues,
        )

    def tensor(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter that the kernel can read."""
        right = parameter.dtype == self.program.dtype and parameter.device.type == "cpu" and parameter.is_contiguous()
        if not right or type(parameter) is not nn.Parameter:
            raise NotCompilable(f"{type(parameter).__name__} in {parameter.dtype} on {parameter.device}")
        return parameter.detach()


class CompiledStep:
    """The step of one model for B streams, as a list of the kernel's operations."""

    def __init__(self, model: nn.Module, hidden: torch.Tensor):
        self.dtype, self.batch_size = hidden.dtype, hidden.shape[0]
        self.watch = ModuleWatch(model)
        self.bytes_read = sum(parameter.nbytes for parameter in model.parameters())
        self.program = self._write(model) if self.watch.unchanged() else None  # or there are hooks or other methods

    def _write(self, model: nn.Module):
        """The kernel's program, or None where the model has no such form."""
        try:
            program = _kernel().StepProgram(self.dtype, self.batch_size)
            writer = StepCompiler(program)
            for number, layer in enumerate(model.layers):
                writer.begin_layer(number)
                layer.compile_step(writer, "hidden")
            writer.rms_norm(model.norm, "hidden", to="hidden")
        except (NotCompilable, ValueError, AttributeError):
            return None
        return program

    @staticmethod
    def is_supported(hidden: torch.Tensor) -> bool:
        """Whether a step of these streams can run this way at all."""
        return hidden.shape[0] <= _MOST_STREAMS and _kernel() is not None

    def matches(self, hidden: torch.Tensor) -> bool:
        """Whether this is still the step of that model, for these streams."""
        return (self.dtype, self.batch_size) == (hidden.dtype, hidden.shape[0]) and self.watch.unchanged()

    def run(
        self, model: nn.Module, hidden: torch.Tensor, state: RecurrentState
    ) -> tuple[torch.Tensor, RecurrentState] | None:
        """See [`run_single_step`]."""
        if self.program is None or (torch.get_num_threads() > 2 and self.bytes_read > _MOST_SHARED_BYTES):
            return None
        if not all(type(t) is torch.Tensor and t.dtype == self.dtype and t.is_contiguous() for t in state.values()):
            return None
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        new_state = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self.program.run({"hidden": hidden, **state, **{f"new {name}": tensor for name, tensor in new_state.items()}})
        return hidden, new_state
