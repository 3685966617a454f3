"""Whole sequences with labels, in the stock Trainer: what the rows of mGRADE's experiments have in common."""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from hf_recurrent.reproduce.training import device_name
from hf_recurrent.trainers.parameter_groups import ParameterGroupsTrainer


def train_supervised(
    model: nn.Module,
    dataset: Dataset,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    warmup_share: float,
    seed: int,
    weight_decay: float = 0.01,
    loss: Callable[..., torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Train with AdamW, linear warm-up and cosine decay (mGRADE, appendix C): what every row records of it.

    Args:
        dataset: items of equal shapes, which are stacked.
        warmup_share: share of the steps in which the learning rate rises.
        loss: of `(outputs, labels, num_items_in_batch=…)`, where the model's own is not meant.
    """
    with tempfile.TemporaryDirectory() as directory:
        trainer = ParameterGroupsTrainer(
            model,
            TrainingArguments(
                directory,
                max_steps=steps,
                per_device_train_batch_size=batch_size,
                learning_rate=learning_rate,
                lr_scheduler_type="cosine",
                warmup_steps=int(steps * warmup_share),
                weight_decay=weight_decay,
                max_grad_norm=1.0,
                seed=seed,
                logging_steps=max(steps // 10, 1),
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_drop_last=True,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=dataset,
            data_collator=default_data_collator,
            compute_loss_func=loss,
        )
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"num_parameters": parameters, "seconds": round(seconds, 2), "device": device_name()}


def build_supervised(auto_class: Any, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A new model of a configuration, initialised with the seed.

    Args:
        auto_class: one of transformers' Auto classes.
    """
    set_seed(seed)
    return auto_class.from_config(config)
