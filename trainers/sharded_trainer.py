"""`ShardedTrainer`: a `Trainer` whose model is replicated (DDP) or sharded (FSDP2), as the launcher asks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from hf_recurrent.trainers.sharding import Replication, build_sharding, sharding_by_trainer


class ShardedTrainer(Trainer):
    """Shards the model of a run that `accelerate launch` or `torchrun` starts with FSDP2, from its constructor on.

    Subclasses that need all weights at once, or call other methods of the model than `forward`, say so with
    `shards_by_layer`.
    """

    shards_by_layer = True
    sharding: Replication

    def __init__(self, model: nn.Module, *arguments: Any, **options: Any):
        super().__init__(model, *arguments, **options)
        if self.sharding.is_sharded and self.optimizer is not None:
            raise ValueError(
                "`optimizers` must be (None, None) with FSDP: the parameters are replaced by their parts."
            )
        self.sharding.shard(model)

    def create_accelerator_and_postprocess(self) -> None:
        self.sharding = build_sharding(self.args.device, self.shards_by_layer)
        if self.sharding.settings.activation_checkpointing:
            self.args.gradient_checkpointing = True
        with sharding_by_trainer():
            super().create_accelerator_and_postprocess()
        if self.sharding.is_sharded:
            # In training as in evaluation: for autocast and compilation, without another wrapper.
            self.accelerator.prepare_model = partial(_prepare_as_it_is, self.accelerator.prepare_model)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.sharding.is_sharded:  # otherwise layer by layer, while they are sharded
            super()._move_model_to_device(model, device)


def _prepare_as_it_is(prepare: Callable[..., nn.Module], model: nn.Module, *_: Any, **options: Any) -> nn.Module:
    return prepare(model, device_placement=False, evaluation_mode=True)
