"""Saving and restoring an optimizer; values from a file are checked before torch uses them."""

import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_recurrent.checkpoints.files import load_tree, read_json, reading_checkpoint, save_tree, write_json
from hf_recurrent.checkpoints.tensor_files import is_sharded, own_part

# Optimizers of torch with states of other shapes than their parameters.
_FACTORED = (torch.optim.Adafactor, torch.optim.LBFGS)
# Modules of optimizers with states of the shape of their parameters.
_ELEMENTWISE = ("torch.optim", "hf_recurrent.")
_LARGEST_TABLE = 4096  # elements of the lookup table of a quantized state


def save_optimizer(
    optimizer: Any, schedule: Any, scaler: Any, directory: str | os.PathLike, *, takes_part: bool, writes: bool
) -> None:
    """Write the state of an optimizer, of its schedule of learning rates, and of a gradient scaler (float16).

    A process `takes_part` if it has a part of the states; all of these gather them, and the one that `writes` saves.
    """
    if takes_part:
        save_tree(optimizer_state(optimizer), directory, "optimizer", writes=writes)
    if writes:
        save_tree(schedule.state_dict(), directory, "scheduler")
        if scaler is not None:
            write_json(scaler.state_dict(), os.path.join(directory, "scaler.json"))


def load_optimizer(optimizer: Any, schedule: Any, scaler: Any, checkpoint: str | os.PathLike) -> None:
    """Restore the files of [`save_optimizer`].

    Raises:
        ValueError: a file is missing or damaged, or belongs to another optimizer or schedule.
    """
    with reading_checkpoint(checkpoint):
        load_optimizer_state(optimizer, load_tree(checkpoint, "optimizer", _own_part_of_state(optimizer)))
        saved, own = load_tree(checkpoint, "scheduler"), schedule.state_dict()
        for name, value in saved.items():
            if type(value) is not type(own.get(name)) or (isinstance(value, list) and len(value) != len(own[name])):
                raise ValueError(f"{checkpoint!r} has another learning rate schedule: `{name}` is {value!r}.")
        schedule.load_state_dict(saved)
    path = os.path.join(checkpoint, "scaler.json")
    if scaler is not None and os.path.isfile(path):
        with reading_checkpoint(path):
            scaler.load_state_dict(read_json(path))


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer with the name of its class, for [`load_optimizer_state`]."""
    return {"class": type(_unwrapped(optimizer)).__name__, **optimizer.state_dict()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Restore a state that [`optimizer_state`] returned, after checking it against the parameters.

    torch's fused optimizers do not check shapes: a state of another shape would be read out of bounds.

    Raises:
        ValueError: it is damaged, or belongs to another optimizer or other parameters.
    """
    own = _unwrapped(optimizer)
    try:
        before, states = saved.get("class", type(own).__name__), dict(saved["state"])  # earlier versions save no class
        groups = [dict(group) for group in saved["param_groups"]]
        numbers = [group["params"] for group in groups]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError("The saved optimizer is damaged: it has no state or parameter groups.") from error
    own_groups = own.state_dict()["param_groups"]
    # A later version of torch may have more names, so one set has to contain the other.
    pairs = [(set(group), set(other)) for group, other in zip(groups, own_groups, strict=False)]
    if before != type(own).__name__ or not all(names <= others or others <= names for names, others in pairs):
        raise ValueError(
            f"The checkpoint was trained with another optimizer, {before}, but `optim` is {type(own).__name__!r} now; "
            "they must be the same."
        )
    if numbers != [group["params"] for group in own_groups]:
        raise ValueError("The saved optimizer has other groups of parameters than this one.")
    for group, other in zip(groups, own_groups, strict=True):
        for key in group.keys() & other.keys():
            if not _same_kind(group[key], other[key]):
                raise ValueError(f"The saved optimizer is damaged: its `{key}` is {group[key]!r}.")
    parameters = [(parameter, _kind(own, group)) for group in own.param_groups for parameter in group["params"]]
    for number, state in states.items():
        if number not in range(len(parameters)) or not isinstance(state, dict):
            raise ValueError(f"The saved optimizer is damaged: it has a state for the parameter {number!r}.")
        for key, value in state.items():
            _check_entry(key, value, *parameters[number], number)
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _own_part_of_state(optimizer: torch.optim.Optimizer) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """The `place` argument of `load_tree`: of the state of a sharded parameter, this process keeps its part."""
    parameters = [parameter for group in _unwrapped(optimizer).param_groups for parameter in group["params"]]

    def place(path: str, value: torch.Tensor) -> torch.Tensor:
        found = re.fullmatch(r"optimizer\.state\.(\d+)\.\w+", path)
        if found is None or int(found[1]) >= len(parameters):
            return value
        like = parameters[int(found[1])]
        return own_part(value, like) if is_sharded(like) and like.shape == value.shape else value

    return place


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)  # of accelerate


def _same_kind(value: Any, own: Any) -> bool:
    """True if a hyperparameter can replace `own`."""
    if isinstance(own, bool) or own is None or value is None:
        return value is None or isinstance(value, bool)
    if isinstance(own, int | float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(own, list | tuple) and isinstance(value, list | tuple):
        return len(value) == len(own) and all(map(_same_kind, value, own))
    return type(value) is type(own)


def _kind(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> type:
    """Class of the optimizer that updates a group: of the parts of a joint one, the part that the group names."""
    return type(getattr(optimizer, "parts", {}).get(group.get("optimizer"), optimizer))


def _check_entry(key: str, value: Any, parameter: nn.Parameter, kind: type, number: int) -> None:
    """Raise a ValueError if an entry of a parameter's state cannot belong to the parameter."""
    subject = f"The saved optimizer has a `{key}` of parameter {number}"
    if not isinstance(value, torch.Tensor):
        if value is not None and not isinstance(value, bool | int | float):
            raise ValueError(f"{subject} that is a {type(value).__name__}; it must be a tensor or a number.")
        return
    is_scalar = key == "step" and value.numel() == 1
    if key in getattr(kind, "row_states", ()):
        is_allowed = value.shape == parameter.shape[:1] and value.is_floating_point()
    elif kind in _FACTORED or not kind.__module__.startswith(_ELEMENTWISE):
        # Sums over rows and columns, or quantized states.
        is_allowed = value.numel() <= max(parameter.numel(), _LARGEST_TABLE)
    else:
        is_allowed = value.shape == parameter.shape and value.is_floating_point() == parameter.is_floating_point()
    if not is_scalar and not is_allowed:
        raise ValueError(
            f"{subject} with shape {tuple(value.shape)} and type {value.dtype}; the parameter has shape "
            f"{tuple(parameter.shape)} and type {parameter.dtype}."
        )
