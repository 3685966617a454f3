"""Muon: momentum whose update of a matrix is orthogonalised (Jordan et al. 2024)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.sharded_tensors import own_part, whole

# Coefficients of the quintic polynomial of Jordan et al., which bring singular values near 1 within five iterations.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def layer_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Weights of the linear maps inside a model, by name, without output heads."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    heads = {head.weight for part in models if isinstance(head := part.get_output_embeddings(), nn.Linear)}
    return {
        f"{prefix}.weight": module.weight
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight not in heads
    }


def orthogonalized(matrices: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Matrices (..., rows, columns) with singular values between about 0.7 and 1.2 instead of their own.

    Newton-Schulz iterations, in float32 on CPUs, where products in bfloat16 can be twenty times slower, and in
    bfloat16 elsewhere.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.float() if matrices.device.type == "cpu" else matrices.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if is_tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Muon for the weights of linear maps: `w -= lr · max(1, rows / columns)^½ · orthogonalized(momentum)`.

    The same steps as `torch.optim.Muon` with its default scaling, but fast on CPUs, with matrices of one shape
    processed together, and for weights that are sharded by FSDP2: each process orthogonalises the whole matrix, and
    keeps its part.

    Args:
        params: matrices (rows, columns), or groups of them.
        lr: learning rate; it has the same meaning for matrices of all shapes.
        weight_decay: decoupled weight decay, relative to `lr`.
        momentum: decay of the mean of past gradients.
        nesterov: look one step ahead.
        iterations: of Newton-Schulz.

    Raises:
        ValueError: a number is not allowed, or a parameter is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
    ):
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"`{name}` is {value}; it must be 0 or more.")
        if not 0 <= momentum < 1:
            raise ValueError(f"`momentum` is {momentum}; it must be at least 0 and below 1.")
        if iterations < 1:
            raise ValueError(f"`iterations` is {iterations}; it must be 1 or more.")
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "iterations": iterations,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices; raise a ValueError if a parameter is not a matrix."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim != 2:
                raise ValueError(f"`params` has a tensor of shape {tuple(parameter.shape)}; it must be a matrix.")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all matrices with a gradient; returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_shape: dict[tuple, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = (*parameter.shape, parameter.dtype, parameter.device)
                    by_shape.setdefault(key, []).append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update matrices of one shape."""
        directions = torch.stack([whole(self._direction(parameter, group)) for parameter in parameters])
        rows, columns = parameters[0].shape
        rate = group["lr"] * max(1, rows / columns) ** 0.5
        for parameter, update in zip(parameters, orthogonalized(directions, group["iterations"]), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(own_part(update, parameter), alpha=-rate)

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        state, momentum = self.state[parameter], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        mean = state["momentum_buffer"]
        mean.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(mean, momentum) if group["nesterov"] else mean
