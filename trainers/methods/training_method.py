"""`TrainingMethod`: the part of a trainer that says what the loss of a block is, and what streams carry."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.records import Phase, Provenance
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, supports_recurrent_state
from hf_recurrent.stock_models.stock_model import CHECKPOINTING_ERROR, StockModelWithState
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.sharding import Replication


class TrainingMethod:
    """How a [`StreamTrainer`] learns from a block of its streams; subclass it for a method of your own.

    A subclass needs `name` and [`loss`]. The trainer runs the backward pass, and keeps the carried tensors by stream,
    detached; checkpoints hold them. By default a recurrent model carries its state, as in [`MultiStreamTrainer`].

    Attributes:
        name: name of the method in the record of training.
        loss_is_mean: True if [`loss`] is the mean of a micro-batch, which the trainer averages over micro-batches and
            processes; False if it is already divided by the targets of the whole optimizer step.
        shards_by_layer: False if the method needs all weights at once, or calls other methods of the model than its
            forward pass, when the model is sharded (FSDP2).
        carries_state: True if streams pass tensors from block to block; set by [`setup`].
    """

    name: str
    loss_is_mean = False
    shards_by_layer = True
    carries_state = False

    # ---- Once, when a trainer is built ----

    def setup(
        self, model: PreTrainedModel, args: MultiStreamTrainingArguments, train_corpus: EpisodeSource | None
    ) -> nn.Module:
        """Check the model, and return the module to train, by default the model.

        Args:
            model: the model as the trainer was given it.
            args: the trainer's own copy of its arguments, which may be changed here.
            train_corpus: the training data, if there are any.

        Raises:
            ValueError: the method cannot train this model with these arguments.
        """
        self.model, self.args, self.source = with_state(model), args, train_corpus
        self.carries_state = supports_recurrent_state(self.model) and args.regime == "multi_stream"
        if self.carries_state and isinstance(self.model, StockModelWithState) and args.gradient_checkpointing:
            raise ValueError(CHECKPOINTING_ERROR)
        return self.model

    def start(self, sharding: Replication) -> None:
        """Take note that the model is on its device, and sharded if it will be."""
        self.sharding = sharding

    # ---- For every block ----

    def zero(self, batch_size: int, device: torch.device | str) -> RecurrentState:
        """Tensors, batch first, that new streams start from."""
        return self.model.init_state(batch_size, device)

    def loss(
        self, model: nn.Module, batch: dict[str, Any], carried: RecurrentState
    ) -> tuple[torch.Tensor, RecurrentState]:
        """The loss of a micro-batch, and the tensors to carry to the next block of its streams.

        Args:
            model: the module of [`setup`], possibly wrapped for several processes.
            batch: `input_ids`, `shift_labels`, `reset_mask` (B, T); `num_targets`, the targets of the whole optimizer
                step; `stream_indices` (B,) and `stream_positions` (B, 2) as arrays of numpy.
            carried: the tensors after the block before, as [`zero`] at first; empty if nothing is carried.
        """
        raise NotImplementedError

    def parts(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Parts of a micro-batch that have a forward and a backward pass each; by default it is one."""
        yield batch

    def learning(self, carried: RecurrentState) -> AbstractContextManager:
        """Context around the forward and the backward pass of a part."""
        return nullcontext()

    # ---- Logs and records ----

    def count_answers(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a block to the training metrics of the source: logits (B, T, V), labels (B, T).

        [`CountLearning`] reads the logits too, if there is a count memory.
        """
        if self.block_logits is not None:
            self.block_logits.append(logits.detach())
        counts = self.source.count_training(logits.detach(), labels)
        if counts is not None:  # stays on the device: reading it would synchronize every step
            self.counts = counts if self.counts is None else self.counts + counts

    def metrics(self, loss: float, total: Callable[[float], float]) -> dict[str, float]:
        """Logged metrics since the last log; then counting starts again.

        Args:
            loss: mean loss since the last log, in nats.
            total: sums a number over all processes, which call it together.
        """
        metrics = {"bits_per_byte": loss / math.log(2)}
        if self.counts is not None:
            metrics |= self.source.training_metrics([total(count) for count in self.counts.tolist()])
            self.counts = None
        return metrics

    def reset(self) -> None:
        """Forget what was counted in an earlier run."""
        self.counts: torch.Tensor | None = None
        self.block_logits: list[torch.Tensor] | None = None  # of the parts of a micro-batch; None if unused

    def counters(self) -> dict[str, Any]:
        """Counts since the last log, for a checkpoint: numbers, tensors and dictionaries of them."""
        return {"unlogged_answers": self.counts}

    def load_counters(self, counters: dict[str, Any]) -> None:
        """Restore [`counters`]; tensors are on the CPU."""
        counts = counters["unlogged_answers"]
        self.counts = None if counts is None else counts.to(self.args.device)

    def settings(self) -> dict[str, Any]:
        """Settings of the method that act in the current step, as JSON values for the record of training."""
        return {}

    def begin_phase(self, phase: Phase, provenance: Provenance) -> None:
        """Add to a new phase of `provenance` what the trainer does not know of it."""

    # ---- What is saved and evaluated ----

    @property
    def trained_model(self) -> PreTrainedModel:
        """The unwrapped model that is saved, evaluated, sampled from and uploaded."""
        return self.model

    @property
    def saved_models(self) -> dict[str, PreTrainedModel]:
        """Models of a checkpoint by subdirectory; the trained model is at ""."""
        return {"": self.trained_model}

    @property
    def frozen_modules(self) -> list[nn.Module]:
        """Modules without gradients while training runs."""
        return []

    def sync(self) -> None:
        """Update `trained_model` before it is used during training, if training works on other weights."""

    def finish(self) -> None:
        """Bring `trained_model` into its final form, at the end of training."""

    def measure(self, source: EpisodeSource) -> dict[str, float]:
        """Further metrics of held-out data, next to the source's own; all processes call this."""
        return {}
