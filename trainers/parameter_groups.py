"""What the optimizer does to which parameter, by what the model says of its own parameters."""

import torch
from transformers import Trainer


class ParameterGroupsTrainer(Trainer):
    """A `Trainer` that does not decay what the model says has no natural place at zero, and learns some of it slower.

    The model says so by its methods `parameters_without_weight_decay` and `parameter_learning_rate_factors`, if it has
    them. An optimizer that is given is left as it is.
    """

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """All that `Trainer` decays but the model's `parameters_without_weight_decay`, where it has such."""
        names = super().get_decay_parameter_names(model)
        if not hasattr(self.model, "parameters_without_weight_decay"):
            return names
        exempt = self.model.parameters_without_weight_decay()
        return [name for name in names if name not in exempt]

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """That of `Trainer`, with a group of its own for every learning-rate factor of the model."""
        made_here = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made_here:
            named = dict((self.model if model is None else model).named_parameters())
            apply_learning_rate_factors(optimizer, self.model, named)
        return optimizer


def apply_learning_rate_factors(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, named: dict[str, torch.nn.Parameter]
) -> None:
    """Give the optimizer a group of its own for every learning-rate factor of the model, if it has some.

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
    """Move parameters whose learning rate has a factor into groups of their own, behind those that there are."""
    for group in list(optimizer.param_groups):
        slower: dict[float, list[torch.nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter in factors:
                slower.setdefault(factors[parameter], []).append(parameter)
        group["params"] = [parameter for parameter in group["params"] if parameter not in factors]
        for factor, parameters in slower.items():
            optimizer.add_param_group({**group, "params": parameters, "lr": factor * group["lr"]})
