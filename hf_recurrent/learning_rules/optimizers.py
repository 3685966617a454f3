"""Settings of the parameters that trainers and the online learner share: frozen modules, learning-rate factors."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

# Second moment of RMSProp for a single stream (Memora, appendix F.5).
RMSPROP_ALPHA = 0.9999


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Disable gradients of the modules' parameters inside the block."""
    parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextmanager
def without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which parameters begin without gradients; the gradients of before come back."""
    kept = {parameter: parameter.grad for parameter in parameters}
    try:
        for parameter in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept.items():
            parameter.grad = gradient


def apply_learning_rate_factors(
    optimizer: torch.optim.Optimizer, model: nn.Module, named: dict[str, nn.Parameter]
) -> None:
    """Give each learning-rate factor of the model a parameter group of its own, after the present groups.

    Args:
        optimizer: an optimizer of all or some of the parameters `named`.
        model: its method `parameter_learning_rate_factors`, if it has one, maps names to factors.
        named: parameters by their names in the model.
    """
    if not hasattr(model, "parameter_learning_rate_factors"):
        return
    factors = model.parameter_learning_rate_factors()
    # Parameters of adapters have other names, and no factor.
    factors = {named[name]: factor for name, factor in factors.items() if factor != 1 and name in named}
    for group in list(optimizer.param_groups):
        slower: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter in factors:
                slower.setdefault(factors[parameter], []).append(parameter)
        group["params"] = [parameter for parameter in group["params"] if parameter not in factors]
        for factor, parameters in slower.items():
            optimizer.add_param_group({**group, "params": parameters, "lr": factor * group["lr"]})
