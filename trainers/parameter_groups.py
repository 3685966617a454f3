"""`ParameterGroupsTrainer`: weight decay and learning rate of each parameter as the model declares them."""

import torch

from hf_recurrent.learning_rules.optimizers import apply_learning_rate_factors
from hf_recurrent.trainers.sharded_trainer import ShardedTrainer


class ParameterGroupsTrainer(ShardedTrainer):
    """A `Trainer` that applies the model's `parameters_without_weight_decay` and `parameter_learning_rate_factors`.

    A custom optimizer is not changed.
    """

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """Names of parameters with weight decay, without the model's `parameters_without_weight_decay`."""
        names = super().get_decay_parameter_names(model)
        if not hasattr(self.model, "parameters_without_weight_decay"):
            return names
        exempt = self.model.parameters_without_weight_decay()
        return [name for name in names if name not in exempt]

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of `Trainer`, with a separate group for each learning-rate factor of the model."""
        made_here = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made_here:
            named = dict((self.model if model is None else model).named_parameters())
            apply_learning_rate_factors(optimizer, self.model, named)
        return optimizer
