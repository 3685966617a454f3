"""Train models of whole labelled sequences in the stock Trainer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments, default_data_collator

from hf_recurrent.reproduce.engine.experiment import Settings
from hf_recurrent.reproduce.engine.training import run_trainer
from hf_recurrent.trainers.parameter_groups import ParameterGroupsTrainer


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
        lambda args: ParameterGroupsTrainer(model, args, **parts),
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
