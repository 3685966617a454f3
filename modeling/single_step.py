"""One byte of few streams as one call of the compiled kernel: one pass over the weights.

Layers describe their `forward` of one step in `write_step`, as operations of the kernel. Nothing else changes: where
the kernel is missing, where a module, hook or type is not what it knows, or where gradients are asked for, `forward`
runs as it stands, and both give the same numbers.

Shape letters: B streams, M model width, S state width, N layers.
"""

import importlib
from functools import cache
from types import ModuleType
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .recurrent_state import RecurrentState

# With more streams, the matrix products of torch read the weights less often.
_MOST_STREAMS = 8
# Larger weights are faster read by several threads, and the kernel is one.
_MOST_SHARED_BYTES = 1 << 26


class NotWritable(Exception):
    """A module has no form as operations of the kernel."""


@cache
def _kernel() -> ModuleType | None:
    try:
        return importlib.import_module("hf_recurrent.kernels.step_cpu")
    except ImportError:
        return None


class StepWriter:
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
            raise NotWritable(type(module).__name__)
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
            raise NotWritable(type(module).__name__)
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
            raise NotWritable(f"{type(parameter).__name__} in {parameter.dtype} on {parameter.device}")
        return parameter.detach()


class _ModuleWatch:
    """Whether a network is still the one that was written: the same modules, parameters and attributes, no hooks."""

    def __init__(self, root: nn.Module):
        parents = [(parent._modules, name) for parent in root.modules() for name in parent._modules]
        self.modules = [
            (children, name, child, child.__class__, len(child.__dict__))
            for children, name in parents
            if (child := children[name]) is not None
        ]
        self.parameters = [
            (module._parameters, name, parameter, parameter.data_ptr(), parameter.dtype)
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        # What stands in front of a method of the class, such as another `forward`.
        self.shadowed = any(callable(getattr(type(m), name, None)) for m in root.modules() for name in m.__dict__)
        self.bytes = sum(parameter.nbytes for parameter in root.parameters())

    def unchanged(self) -> bool:
        if self.shadowed:
            return False
        for children, name, child, kind, attributes in self.modules:
            if (
                children.get(name) is not child
                or child.__class__ is not kind
                or child._forward_hooks
                or child._forward_pre_hooks
                or len(child.__dict__) != attributes  # something may stand in front of a method
            ):
                return False
        for parameters, name, parameter, address, dtype in self.parameters:
            if parameters.get(name) is not parameter or parameter.data_ptr() != address or parameter.dtype != dtype:
                return False
        return True


class _WrittenStep:
    """The step of one model for B streams."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, batch_size: int):
        self.key = dtype, batch_size
        self.watch = _ModuleWatch(model)
        self.program = None
        if not self.watch.unchanged():  # there are hooks or other methods
            return
        try:
            program = _kernel().StepProgram(dtype, batch_size)
            writer = StepWriter(program)
            for number, layer in enumerate(model.layers):
                writer.begin_layer(number)
                layer.write_step(writer, "hidden")
            writer.rms_norm(model.norm, "hidden", to="hidden")
        except (NotWritable, ValueError, AttributeError):
            return
        self.program = program

    def fits(self, dtype: torch.dtype, batch_size: int) -> bool:
        return self.key == (dtype, batch_size) and self.watch.unchanged()


# Beside the models and not in them, so that they can be copied, saved and sent as they are.
_written: WeakKeyDictionary[nn.Module, _WrittenStep] = WeakKeyDictionary()


def run_single_step(
    model: nn.Module, hidden: torch.Tensor, state: RecurrentState
) -> tuple[torch.Tensor, RecurrentState] | None:
    """Read one byte of every stream, without gradients.

    Args:
        model: has `layers` and a final `norm`.
        hidden: (B, 1, M), the embedded bytes.
        state: of these streams.

    Returns:
        The output after the final norm (B, 1, M) and the new state, or None where `forward` has to run as it stands.
    """
    batch_size, dtype = hidden.shape[0], hidden.dtype
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or type(hidden) is not torch.Tensor
        or hidden.device.type != "cpu"
        or batch_size > _MOST_STREAMS
        or torch.is_autocast_enabled("cpu")
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or _kernel() is None
    ):
        return None
    written = _written.get(model)
    if written is None or not written.fits(dtype, batch_size):
        written = _written[model] = _WrittenStep(model, dtype, batch_size)
    if written.program is None or (torch.get_num_threads() > 2 and written.watch.bytes > _MOST_SHARED_BYTES):
        return None
    if not all(type(t) is torch.Tensor and t.dtype == dtype and t.is_contiguous() for t in state.values()):
        return None
    hidden = hidden.clone(memory_format=torch.contiguous_format)
    new_state = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    written.program.run({"hidden": hidden, **state, **{f"new {name}": tensor for name, tensor in new_state.items()}})
    return hidden, new_state
