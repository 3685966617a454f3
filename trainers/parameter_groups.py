"""What the optimizer does to which parameter, by what the model says of its own parameters."""

import torch
from transformers import Trainer


class ParameterGroupsTrainer(Trainer):
    """A `Trainer` that does not decay what the model says has no natural place at zero."""

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """All that `Trainer` decays but the model's `parameters_without_weight_decay`, where it has such."""
        names = super().get_decay_parameter_names(model)
        if not hasattr(self.model, "parameters_without_weight_decay"):
            return names
        exempt = self.model.parameters_without_weight_decay()
        return [name for name in names if name not in exempt]
