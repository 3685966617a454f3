"""The common part of optimizers of matrices, and of the steps of optimizers."""

from collections.abc import Callable
from typing import Any

import torch


def result_of(closure: Callable[[], Any] | None) -> Any:
    """The result of the closure of an optimizer's step, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_not_negative(**values: float) -> None:
    """Raise a ValueError that names the first value below 0, or NaN."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"`{name}` is {value}; it must be 0 or more.")


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer of matrices; a subclass gives `update_group`.

    Raises:
        ValueError: a parameter is not a matrix.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices; raise a ValueError if a parameter is not a matrix."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim != 2:
                raise ValueError(f"`params` has a tensor of shape {tuple(parameter.shape)}; it must be a matrix.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with a gradient; returns the result of `closure`."""
        loss = result_of(closure)
        for group in self.param_groups:
            self.update_group(group)
        return loss

    def update_group(self, group: dict[str, Any]) -> None:
        """Update those parameters of a group that have a gradient."""
        raise NotImplementedError
