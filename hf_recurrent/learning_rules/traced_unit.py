"""Parameters that the state of a recurrent unit depends on, and a recorder of the tensors of one forward pass.

Shape letters: B streams or batch, I inputs of a linear map, S state width, G channel groups, C channels of a group.
S = C · G; `rows` is the number of outputs of a map in a group.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hf_recurrent.modeling.units.recurrent_unit import RecurrentUnit


@dataclass
class TracedUnit:
    """A recurrent unit, its name in the model, and the maps and vectors of the unit that its state depends on."""

    name: str
    unit: RecurrentUnit
    linears: dict[str, nn.Linear]
    vectors: dict[str, nn.Parameter]

    @property
    def groups(self) -> int:
        """G, number of channel groups."""
        return self.unit.channel_groups

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters that the state depends on, by their names in the model."""
        found = {}
        for name, linear in self.linears.items():
            found |= {f"{self.name}.{name}.{part}": parameter for part, parameter in linear.named_parameters()}
        found |= {f"{self.name}.{name}": parameter for name, parameter in self.vectors.items()}
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def sensitivity_shape(self, parameter: nn.Parameter, batch_size: int) -> torch.Size:
        """(B, C, rows, G) for a vector or bias, (B, C, rows, G, I) for a matrix."""
        channels = self.unit.state_size // self.groups
        rows = parameter.shape[0] // self.groups
        return torch.Size((batch_size, channels, rows, self.groups, *parameter.shape[1:]))


def find_traced_parameters(name: str, unit: RecurrentUnit, dtype: torch.dtype) -> TracedUnit:
    """Find the parameters that the unit's state depends on by running one step.

    Raises:
        ValueError: the unit mixes its channels, or a parameter is neither a vector nor part of an `nn.Linear`.
    """
    everything = TracedUnit(
        name,
        unit,
        {child: module for child, module in unit.named_children() if isinstance(module, nn.Linear)},
        dict(unit.named_parameters(recurse=False)),
    )
    known = {id(p) for linear in everything.linears.values() for p in linear.parameters()}
    known |= {id(vector) for vector in everything.vectors.values() if vector.dim() == 1}
    for parameter_name, parameter in unit.named_parameters():
        if id(parameter) not in known:
            raise ValueError(
                f"`{name}.{parameter_name}` is neither a vector nor a parameter of an `nn.Linear`, so it has no "
                "sensitivity; use `bptt`."
            )
    weight, recorder = next(unit.parameters()), UnitRecorder(everything, dtype)
    with torch.enable_grad(), recorder.recording():
        unit(
            _pseudo_random(2, 1, unit.input_size, like=weight),
            _pseudo_random(2, unit.state_size, like=weight).to(dtype).requires_grad_(),
        )
    outputs = {child: output for child, (_, output) in recorder.projections.items()}
    linears, vectors = (_inputs_of(recorder.final_state, inputs) for inputs in (outputs, recorder.vectors))
    found = TracedUnit(
        name,
        unit,
        {child: everything.linears[child] for child in linears},
        {child: everything.vectors[child] for child in vectors},
    )
    if _mixes_channels(found, recorder, [outputs[child] for child in linears]):
        raise ValueError(
            f"`{name}` is a {type(unit).__name__}, whose recurrence mixes its channels: exact real-time recurrent "
            "learning would need a sensitivity for every pair of weight and channel. Use backpropagation through time "
            "(`bptt`) or, for a `DenseUnit`, the approximation SnAp-1 (`snap1`)."
        )
    return found


def _inputs_of(output: torch.Tensor, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that an output depends on."""
    if not tensors:
        return []
    gradients = torch.autograd.grad(output.sum(), [*tensors.values()], retain_graph=True, allow_unused=True)
    return [name for name, gradient in zip(tensors, gradients, strict=True) if gradient is not None]


def _mixes_channels(traced: TracedUnit, recorder: "UnitRecorder", projections: list[torch.Tensor]) -> bool:
    """True if a channel group of the final state depends on another one."""
    groups, state, final_state = traced.groups, recorder.state, recorder.final_state
    if any(tensor.shape[-1] % groups for tensor in (*projections, *traced.vectors.values())):
        return True
    if any(projection.requires_grad and _inputs_of(projection, {"state": state}) for projection in projections):
        return True
    for group in {0, groups // 2, groups - 1}:
        channels = final_state.unflatten(-1, (-1, groups))[..., group]
        for gradient in torch.autograd.grad(channels.sum(), [state, *projections], retain_graph=True):
            elsewhere = torch.arange(groups, device=gradient.device) != group
            if bool(gradient.unflatten(-1, (-1, groups))[..., elsewhere].any()):
                return True
    return False


def _pseudo_random(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """Numbers between -1 and 1 that do not change the state of a random generator."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float64) ** 1.5).reshape(shape).to(like)


def differentiable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with `requires_grad`, which is not set if it comes from frozen parameters."""
    return tensor if tensor.requires_grad else tensor.requires_grad_()


@contextmanager
def shadowed(unit: nn.Module, **attributes) -> Iterator[None]:
    """Temporarily override attributes; instance attributes take precedence over parameters and methods."""
    before = {name: unit.__dict__[name] for name in attributes if name in unit.__dict__}
    unit.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del unit.__dict__[name]
        unit.__dict__.update(before)


@contextmanager
def shadowed_each(units: Iterable[nn.Module], attribute: str, replacement: Callable[..., object]) -> Iterator[None]:
    """Temporarily override an attribute of every unit by `replacement(unit)`."""
    with ExitStack() as stack:
        for unit in units:
            stack.enter_context(shadowed(unit, **{attribute: replacement(unit)}))
        yield


class UnitRecorder:
    """Records the tensors that sensitivities are computed from, without changing the unit's outputs.

    These are the inputs and outputs of the maps, and one copy of the vectors for each stream, so that the gradients of
    streams are separate.
    """

    def __init__(self, traced: TracedUnit, dtype: torch.dtype):
        self.traced, self.dtype = traced, dtype
        self.projections: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.vectors: dict[str, torch.Tensor] = {}
        self.state: torch.Tensor | None = None
        self.final_state: torch.Tensor | None = None
        self.has_run = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        unit = self.traced.unit
        recur = unit.recur

        def recorded(projections, state, reset_mask=None, padding_mask=None):
            if self.has_run:
                raise ValueError(
                    f"`{self.traced.name}` ran twice in one block; sensitivities need one forward pass a block, "
                    "without gradient checkpointing."
                )
            self.has_run = True
            self.state = self.enter(state)
            # Cast before the expansion: a sum of gradients in bfloat16 would lose precision.
            self.vectors = {
                name: differentiable(vector.to(self.dtype).expand(len(state), 1, -1))
                for name, vector in self.traced.vectors.items()
            }
            with shadowed(unit, **self.vectors):
                states, final_state = recur(projections, self.state, reset_mask, padding_mask)
            self.final_state = final_state
            self.leave()
            return states, final_state

        handles = [linear.register_forward_hook(self._note(name)) for name, linear in self.traced.linears.items()]
        try:
            with shadowed(unit, recur=recorded):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str):
        def hook(linear, inputs, output):
            output = differentiable(output.to(self.dtype))
            self.projections[name] = inputs[0].detach(), output
            return output

        return hook

    def enter(self, state: torch.Tensor) -> torch.Tensor:
        """Return the state before the block."""
        return state

    def leave(self) -> None:
        """Called after the final state is computed."""
