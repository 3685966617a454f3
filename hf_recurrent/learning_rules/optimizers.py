"""Optimizer settings that trainers and the online learner share."""

import torch

# Second moment of RMSProp for a single stream (Memora, appendix F.5).
RMSPROP_ALPHA = 0.9999


def apply_learning_rate_factors(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, named: dict[str, torch.nn.Parameter]
) -> None:
    """Give the optimizer a group of its own for every learning-rate factor of the model, if it has any.

    Args:
        optimizer: of the parameters `named`, all or some.
        model: says by `parameter_learning_rate_factors` which parameters learn slower.
        named: parameters by their names in the model.
    """
    if hasattr(model, "parameter_learning_rate_factors"):
        factors = model.parameter_learning_rate_factors()
        # An adapter's parameters have other names, and learn at the one rate.
        factors = {named[name]: factor for name, factor in factors.items() if factor != 1 and name in named}
        split_groups(optimizer, factors)


def split_groups(optimizer: torch.optim.Optimizer, factors: dict[torch.nn.Parameter, float]) -> None:
    """Move parameters whose learning rate has a factor into groups of their own, after the present ones."""
    for group in list(optimizer.param_groups):
        slower: dict[float, list[torch.nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter in factors:
                slower.setdefault(factors[parameter], []).append(parameter)
        group["params"] = [parameter for parameter in group["params"] if parameter not in factors]
        for factor, parameters in slower.items():
            optimizer.add_param_group({**group, "params": parameters, "lr": factor * group["lr"]})
