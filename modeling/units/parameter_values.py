"""Setting parameters to computed values, in the way of `transformers.initialization`: loaded ones stay as they are."""

import torch
from torch import nn
from transformers import initialization as init


def copy_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set a parameter, also one that is sharded (FSDP), where the values of the first process are taken."""
    if hasattr(parameter, "device_mesh") and not hasattr(values, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    init.copy_(parameter, values)


def copy_log(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set a parameter to the logarithm of positive values."""
    copy_values(parameter, torch.log(values))
