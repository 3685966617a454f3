"""Train models of whole labelled sequences in the stock Trainer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, default_data_collator

from hf_recurrent import apply_learning_rate_factors
from papers.engine.experiment import Settings
from papers.engine.training import run_trainer


class Wrapper(nn.Module):
    """A module around a model of ours, the attribute `inner`; passes on what the model declares of its parameters."""

    inner = "backbone"

    def parameters_without_weight_decay(self) -> set[str]:
        return {f"{self.inner}.{name}" for name in getattr(self, self.inner).parameters_without_weight_decay()}

    def parameter_learning_rate_factors(self) -> dict[str, float]:
        factors = getattr(getattr(self, self.inner), "parameter_learning_rate_factors", dict)()
        return {f"{self.inner}.{name}": factor for name, factor in factors.items()}


class SupervisedTrainer(Trainer):
    """The stock trainer, with weight decay and learning rate of each parameter as the model declares them."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        exempt = getattr(self.model, "parameters_without_weight_decay", set)()
        return [name for name in super().get_decay_parameter_names(model) if name not in exempt]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        apply_learning_rate_factors(optimizer, self.model, dict(self.model.named_parameters()))
        return optimizer


def train_supervised(
    model: nn.Module,
    dataset: Dataset,
    settings: Settings,
    *,
    warmup_share: float,
    weight_decay: float = 0.01,
    loss: Callable[..., torch.Tensor] | None = None,
    collator: Callable[..., Any] = default_data_collator,
) -> dict[str, Any]:
    """Train with AdamW, linear warm-up, cosine decay and gradients clipped to a norm of 1.

    Args:
        dataset: items of equal shapes, which are stacked, or any that `collator` makes batches of.
        settings: a row with `steps` or `epochs`, `batch_size`, `learning_rate`, `seed`, and `arguments`, which are
            fields of `TrainingArguments`, if these are to be other ones.
        warmup_share: share of the steps in which the learning rate rises.
        loss: function of `(outputs, labels, num_items_in_batch=…)`; by default the model's own loss.

    Returns:
        `num_parameters`, `seconds` and `device`.
    """
    steps = settings.get("steps") or max(settings["epochs"] * len(dataset) // settings["batch_size"], 1)
    parts = {"train_dataset": dataset, "data_collator": collator, "compute_loss_func": loss}
    decay = {"lr_scheduler_type": "cosine", "warmup_steps": int(steps * warmup_share), "weight_decay": weight_decay}
    return run_trainer(
        lambda args: SupervisedTrainer(model, args, **parts),
        TrainingArguments,
        steps=steps,
        per_device_train_batch_size=settings["batch_size"],
        learning_rate=settings["learning_rate"],
        bf16=False,
        seed=settings["seed"],
        dataloader_drop_last=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        **decay | {"max_grad_norm": 1.0} | settings.get("arguments", {}),
    )
