"""The state of a recurrent model, its memory, as a flat dictionary of tensors.

The state goes into `forward` and comes out; it never lives on a module. Every tensor's first dimension is the
batch (B streams), so that selecting, reordering and storing streams is one line for every family.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from .tensor_checks import check_tensor

RecurrentState = dict[str, Tensor]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of states: float64 for a float64 model, float32 for every narrower one."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(tensor: Tensor) -> Tensor:
    """`tensor` in [`state_dtype`], the type of gates, states and losses."""
    return tensor.to(state_dtype(tensor.dtype))


def in_state_dtype(state: RecurrentState, dtype: torch.dtype) -> RecurrentState:
    """The state in the type that a model of `dtype` computes with; parts of integers stay."""
    target = state_dtype(dtype)
    return {name: tensor.to(target) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


class StatefulModel:
    """For a model whose `forward` takes and returns a state."""

    supports_recurrent_state = True

    def state_layout(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of one stream's state."""
        raise NotImplementedError

    @property
    def integer_state_parts(self) -> frozenset[str]:
        """Parts of the state that are uint8; all others are floating-point numbers."""
        return frozenset()

    def state_shapes(self, batch_size: int) -> dict[str, torch.Size]:
        """Shape of every tensor of the state of `batch_size` streams."""
        return {name: torch.Size((batch_size, *shape)) for name, shape in self.state_layout().items()}

    def init_state(self, batch_size: int, device: torch.device | str | None = None) -> RecurrentState:
        """The zero state of `batch_size` streams, the start of every episode."""
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}; it must be at least 1.")
        device, integers = self.device if device is None else device, self.integer_state_parts
        return {
            name: torch.zeros(shape, dtype=torch.uint8 if name in integers else state_dtype(self.dtype), device=device)
            for name, shape in self.state_shapes(batch_size).items()
        }


def supports_recurrent_state(model: torch.nn.Module) -> bool:
    """True for models whose `forward` takes and returns a [`RecurrentState`]; stock models do not."""
    return bool(getattr(model, "supports_recurrent_state", False))


def detach_state(state: RecurrentState) -> RecurrentState:
    """The same state cut from the graph, to carry to the next block (truncated backpropagation)."""
    return {name: tensor.detach() for name, tensor in state.items()}


def select_state(state: RecurrentState, index: Tensor | Sequence[int] | int) -> RecurrentState:
    """The streams `index` (any number, in any order, repeats allowed) of a state; one stream for an int.

    Raises:
        IndexError: there is no such stream; negative numbers are not allowed.
    """
    if not isinstance(index, Tensor):
        index = torch.tensor([index] if isinstance(index, int) else list(index), dtype=torch.long)
    return {name: tensor.index_select(0, index.to(tensor.device)) for name, tensor in state.items()}


def split_state(state: RecurrentState) -> list[RecurrentState]:
    """A state of B streams as B states of one stream each, in memory of their own."""
    streams = len(next(iter(state.values()), ()))
    return [select_state(state, stream) for stream in range(streams)]


def join_states(states: Sequence[RecurrentState]) -> RecurrentState:
    """States of any numbers of streams as one, in the given order: the reverse of [`split_state`].

    Raises:
        ValueError: there is none, or they are of different models.
    """
    if not states:
        raise ValueError("`states` is empty; it must have at least one state.")
    shapes = {name: tensor.shape[1:] for name, tensor in states[0].items()}
    for number, state in enumerate(states):
        if {name: tensor.shape[1:] for name, tensor in state.items()} != shapes:
            raise ValueError(f"`states[{number}]` has other tensors than `states[0]`; all must be of one model.")
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


def state_size(state: RecurrentState) -> int:
    """Bytes that one stream's state takes."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in state.values())


def check_state(
    state: RecurrentState,
    expected: Mapping[str, torch.Size],
    device: torch.device | None = None,
    *,
    integer_parts: Collection[str] | None = (),
) -> None:
    """Raise an error that names the first part of `state` that is not as `expected`.

    Layers may be on several devices: with the `device` of the inputs, only parts on the meta device are refused.
    `integer_parts` are uint8, and all others floating-point numbers; with None, every type is allowed.

    Raises:
        TypeError: the state is not a dictionary, or a part is not a tensor.
        ValueError: a part is missing, unknown, of another shape, not of real numbers, or its memory was freed.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"`state` is of type {type(state).__name__}; it must be a dictionary of tensors.")
    for name, shape in expected.items():
        if name not in state:
            raise ValueError(f"`state` has no `{name}`; this model's state holds {sorted(expected)}.")
        tensor = state[name]
        check_tensor(f"state['{name}']", tensor)
        if tensor.shape != shape:
            raise ValueError(
                f"`state['{name}']` has shape {tuple(tensor.shape)}, but batch and model need {tuple(shape)}."
            )
        if integer_parts is not None and name in integer_parts:
            if tensor.dtype != torch.uint8:
                raise ValueError(f"`state['{name}']` has type {tensor.dtype}; it must be torch.uint8.")
        elif integer_parts is not None and not tensor.is_floating_point():
            raise ValueError(f"`state['{name}']` has type {tensor.dtype}; it must be a floating-point type.")
        if device is not None and tensor.is_meta and device.type != "meta":
            raise ValueError(f"`state['{name}']` is on the meta device, but the inputs are on {device}.")
    if unknown := sorted(map(str, state.keys() - expected.keys())):
        raise ValueError(f"`state` holds {unknown}, which this model does not have; it needs {sorted(expected)}.")
