"""`JointOptimizer`: several optimizers, each of some parameters, as one for trainers, schedules and checkpoints."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from hf_recurrent.learning_rules.muon import Muon, layer_matrices, result_of
from hf_recurrent.learning_rules.rowwise_adagrad import RowwiseAdagrad, restore_row_sums, sparse_tables

ADAMW, MUON = "adamw", "muon"
MATRIX_OPTIMIZERS = (ADAMW, MUON)


class JointOptimizer(torch.optim.Optimizer):
    """Optimizers of different classes, without common parameters, that step together.

    All groups and states are here, so a schedule scales every rate, and `state_dict` is complete. A group's key
    "optimizer" is the name of the class that updates it.
    """

    row_states = RowwiseAdagrad.row_states

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self.parts = {type(part).__name__: part for part in parts}
        groups = [{**group, "optimizer": name} for name, part in self.parts.items() for group in part.param_groups]
        super().__init__(groups, {})

    @property
    def description(self) -> str:
        """The names of the classes that have parameters."""
        return ", ".join(dict.fromkeys(group["optimizer"] for group in self.param_groups if group["params"]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of every optimizer; returns the result of `closure`."""
        loss = result_of(closure)
        self.bind_parts()
        for part in self.parts.values():
            part.step()
        return loss

    def bind_parts(self) -> None:
        """Give every part its groups and states, which may be new, so that it can step alone."""
        for name, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["optimizer"] == name]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; raise a ValueError if its groups belong to other optimizers."""
        saved = [group.get("optimizer") for group in state_dict["param_groups"]]
        own = [group["optimizer"] for group in self.param_groups]
        if saved != own:
            raise ValueError(f"The saved groups of parameters belong to the optimizers {saved}, these to {own}.")
        super().load_state_dict(state_dict)
        restore_row_sums(self, state_dict)


def join_optimizers(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    matrix_optimizer: str = ADAMW,
    matrix_learning_rate: float = 0.02,
    table_learning_rate: float = 0.02,
) -> torch.optim.Optimizer:
    """Move the model's tables, and with "muon" the matrices of its layers, from `optimizer` to their own optimizers.

    `optimizer` is of all trained parameters, without states yet; it is returned if there is nothing to move.
    """
    matrices = layer_matrices(model).values() if matrix_optimizer == MUON else ()
    moved = _take(optimizer, set(matrices))
    parts = [Muon(_with_rate(moved, matrix_learning_rate, "weight_decay"))] if moved else []
    if moved := _take(optimizer, set(sparse_tables(model).values())):
        parts.append(RowwiseAdagrad(_with_rate(moved, table_learning_rate)))
    return JointOptimizer([optimizer, *parts]) if parts else optimizer


def _take(optimizer: torch.optim.Optimizer, chosen: Collection[nn.Parameter]) -> list[dict[str, Any]]:
    """Remove parameters from the groups of an optimizer; returns them in groups with the same settings."""
    taken = []
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter in chosen]
        if parameters:
            group["params"] = [parameter for parameter in group["params"] if parameter not in chosen]
            taken.append({**group, "params": parameters})
    if taken:  # `Trainer` separates sharded parameters from others; without empty groups, checkpoints fit both ways
        optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    return taken


def _with_rate(groups: list[dict[str, Any]], rate: float, *kept: str) -> list[dict[str, Any]]:
    """The groups with a learning rate and the named ones of their settings."""
    return [{"params": group["params"], "lr": rate} | {name: group[name] for name in kept} for group in groups]
