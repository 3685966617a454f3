"""Muon: momentum whose update of a matrix is orthogonalised (Jordan et al. 2024)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.tensor_files import own_part, whole


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
    """An optimizer of matrices; a subclass gives `update`."""

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
            self.update([parameter for parameter in group["params"] if parameter.grad is not None], group)
        return loss

    def update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters with gradients by the settings of their group."""
        raise NotImplementedError


# Odd polynomials a·x + b·x³ + c·x⁵, applied one after another. Each is the best approximation of 1 on the interval to
# which the ones before map [0.005, 1] (the construction of Polar Express, Amsel et al. 2025).
_POLYNOMIALS = (
    (8.2987, -24.4305, 18.0903),
    (3.9152, -2.9211, 0.5592),
    (3.1746, -2.3804, 0.4978),
    (2.1895, -1.5672, 0.4079),
)


def layer_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights of the linear maps inside a model, by name, without output heads."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    heads = {head.weight for part in models if isinstance(head := part.get_output_embeddings(), nn.Linear)}
    return {
        f"{prefix}.weight": module.weight
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight not in heads
    }


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (n, rows, columns) with the same singular vectors, and singular values near 1.

    Values above 0.005 of the Frobenius norm become 0.92 to 1.08, smaller ones grow 200 times. Float32 on CPUs, where
    products in bfloat16 can be twenty times slower, and bfloat16 elsewhere.
    """
    x = matrices.float() if matrices.device.type == "cpu" else matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in _POLYNOMIALS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


class Muon(MatrixOptimizer):
    """Muon for the weights of linear maps: `w -= lr · max(1, rows / columns)^½ · orthogonalized(momentum)`.

    As `torch.optim.Muon` with its default scaling, but fast on CPUs, in four iterations instead of five, with matrices
    of one shape processed together, and for weights that are sharded by FSDP2: each process orthogonalises the whole
    matrix, and keeps its part.

    Args:
        params: matrices (rows, columns), or groups of them.
        lr: learning rate; it has the same meaning for matrices of all shapes.
        weight_decay: decoupled weight decay, relative to `lr`.
        momentum: decay of the mean of past gradients.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
    ):
        check_not_negative(lr=lr, weight_decay=weight_decay)
        if not 0 <= momentum < 1:
            raise ValueError(f"`momentum` is {momentum}; it must be at least 0 and below 1.")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, defaults)

    def update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        by_shape: dict[tuple, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_shape.setdefault((*parameter.shape, parameter.dtype, parameter.device), []).append(parameter)
        for (rows, columns, *_), alike in by_shape.items():
            directions = torch.stack([whole(self._direction(parameter, group)) for parameter in alike])
            rate = group["lr"] * max(1, rows / columns) ** 0.5
            for parameter, update in zip(alike, orthogonalized(directions), strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(own_part(update, parameter), alpha=-rate)

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        state, momentum = self.state[parameter], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        mean = state["momentum_buffer"]
        mean.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(mean, momentum) if group["nesterov"] else mean
