"""`EpisodeSource`: all that trainers, evaluation and commands ask of data. Nothing else asks what kind data are.

`Corpus` and `Task` implement it, and so does a user's own class: a sensor, a simulator, a database.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, TrainingArguments

from hf_recurrent.modeling.recurrent_state import supports_recurrent_state


@dataclass(frozen=True)
class EvaluationShare:
    """The part of held-out data that one process evaluates, and how it reads it.

    Args:
        index: number of the share, below `count`.
        count: number of shares; together they are all of the data, each part once.
        batch_size: B, episodes read side by side.
        block_size: T of a block; without a carried state it may be the window that a model sees.
        carry_state: False resets the state at each block.
        progress: show a progress bar.
    """

    index: int = 0
    count: int = 1
    batch_size: int = 8
    block_size: int = 1024
    carry_state: bool = True
    progress: bool = False


class EpisodeSource(Protocol):
    """Episodes to train and evaluate on. A class of your own inherits from this one.

    It has to give the four attributes without a value, `blocks`, `evaluate` and `evaluation_metrics`; the defaults of
    the other methods suit most sources.

    Attributes:
        name: for messages, model cards and progress bars.
        fingerprint: differs for any other content; a checkpoint is resumed on the same fingerprint only.
        vocab_size: V; token ids are below it.
        tokens_per_epoch: tokens of an epoch; `math.inf` for a source without end.
        unit: what one token is: "byte", "symbol" or "pixel".
        episode_length: T of every episode where blocks may be whole episodes, as in tasks; None for any lengths.
    """

    name: str
    fingerprint: str
    vocab_size: int
    tokens_per_epoch: int | float
    unit: str = "byte"
    episode_length: int | None = None

    @abstractmethod
    def blocks(
        self,
        num_streams: int,
        block_size: int,
        seed: int = 0,
        *,
        regime: str = "multi_stream",
        stream_indices: Sequence[int] | np.ndarray | None = None,
        accumulation_groups: int = 1,
        positions: object = None,
    ) -> IterableDataset:
        """Endless batches for training, with the arguments and keys of [`MultiStreamDataset`].

        Stream k has to show the same tokens for the same seed, whatever the other arguments, and to go on from its
        `positions`. Subclass `BlockDataset` for grouping, workers and checks.

        Args:
            regime: "multi_stream", or "iid" for blocks that have nothing to do with each other.
        """

    @abstractmethod
    def evaluate(self, model: PreTrainedModel, share: EvaluationShare) -> dict[str, float]:
        """Sums over a share of the held-out data, which add up over shares. The model's mode is left as it was."""

    @abstractmethod
    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from the sums of all shares: `loss` in nats per target, `bits_per_byte`, `accuracy`, …"""

    def check_model(self, argument: str, model: PreTrainedModel, window: int | None = None) -> None:
        """Raise a ValueError that names `argument` where `model` cannot read this source.

        Args:
            window: T that a model without a state is evaluated with, or None.
        """
        check_vocabulary(argument, self, model)
        check_window("block_size", window, model)

    def check_training(self, args: TrainingArguments, carries_state: bool) -> None:
        """Raise a ValueError where training with `args` has no end or cannot read these episodes."""
        if math.isinf(self.tokens_per_epoch) and args.max_steps <= 0 and not args.train_bytes:
            raise ValueError(f"`train_corpus` {self.name!r} is endless; give `max_steps` or `train_bytes`.")

    def count_training(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """Counts of a block, (n,) on its device, that add up to [`training_metrics`]; None for none.

        Args:
            logits: (B, T, V).
            labels: (B, T), -100 where nothing is asked.
        """
        return None

    def training_metrics(self, counts: Sequence[float]) -> dict[str, float]:
        """Metrics for the log from the counts since the last one."""
        return {}

    def first_anchor(self, context_length: int) -> int:
        """First position of a block that a memory may be made at (SMT): 0 where blocks begin with an episode."""
        return context_length

    def held_out_blocks(self, num_blocks: int, block_size: int) -> dict[str, torch.Tensor]:
        """The same blocks at every call: `input_ids`, `shift_labels` and `reset_mask`, (num_blocks, T) each."""
        batch = next(iter(self.blocks(num_blocks, block_size, seed=0, regime="iid")))
        return {name: batch[name] for name in ("input_ids", "shift_labels", "reset_mask")}

    def limit(self, max_tokens: int) -> "EpisodeSource":
        """A part of the held-out data, always the same, of at most so many tokens."""
        return self

    def describe(self, held_out: bool = False) -> str:
        """Size in words, for reports and model cards."""
        return (
            f"endless {self.unit}s" if math.isinf(self.tokens_per_epoch) else f"{self.tokens_per_epoch:,} {self.unit}s"
        )

    def describe_result(self, metrics: dict[str, Any]) -> str:
        """Evaluation metrics in words, with the size of the held-out data where the metrics have it."""
        return ", ".join(f"{value:.4g} {name.replace('_', ' ')}" for name, value in metrics.items())


def check_vocabulary(argument: str, source: EpisodeSource, model: PreTrainedModel) -> None:
    """Raise a ValueError where a source has more token ids than the model's vocabulary."""
    if source.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"`{argument}` {source.name!r} has {source.vocab_size} token ids, but the model's vocabulary has only "
            f"{model.config.vocab_size}."
        )


def position_limit(model: PreTrainedModel) -> float:
    """Positions that a model has: no end for a recurrent one."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return math.inf if limit is None or supports_recurrent_state(model) else limit


def check_window(argument: str, window: int | None, model: PreTrainedModel) -> None:
    """Raise a ValueError where a model without a recurrent state has fewer positions than a window."""
    if window is not None and window > position_limit(model):
        raise ValueError(f"`{argument}` is {window}; the model has {position_limit(model)} positions.")


def with_unit(value: float, unit: str = "") -> str:
    """1234567 → 1.2 M."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()
