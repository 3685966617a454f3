"""`EpisodeSource`: the interface between data and trainers, evaluation and commands.

`Corpus` and `Task` implement it. Users can implement it for other data, such as a sensor, a simulator or a database.
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

from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state


@dataclass(frozen=True)
class EvaluationShare:
    """The share of the held-out data that one process evaluates, and how.

    Args:
        index: number of the share, below `count`.
        count: number of shares, which together cover the data once.
        batch_size: B, number of episodes read in parallel.
        block_size: T; the context window if no state is carried.
        carry_state: carry the state from block to block; False resets it at each block.
        progress: show a progress bar.
    """

    index: int = 0
    count: int = 1
    batch_size: int = 8
    block_size: int = 1024
    carry_state: bool = True
    progress: bool = False


class EpisodeSource(Protocol):
    """Episodes to train and evaluate on. Subclass it to use your own data.

    Required are the four attributes without a default, `blocks`, `evaluate` and `evaluation_metrics`; the defaults of
    the other methods suit most sources.

    Attributes:
        name: name in messages, model cards and progress bars.
        fingerprint: identifies the content; a checkpoint can be resumed only with the same fingerprint.
        vocab_size: V; token ids are below it.
        tokens_per_epoch: number of tokens of an epoch; `math.inf` for an endless source.
        unit: "byte", "symbol" or "pixel", the meaning of one token.
        episode_length: T of every episode, if blocks can be whole episodes as in tasks; None if lengths vary.
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
        positions: Any = None,
    ) -> IterableDataset:
        """Endless batches for training, with the arguments and keys of [`MultiStreamDataset`].

        The tokens of a stream must depend on the seed and the number of streams only, and continue from `positions`.
        [`BlockDataset`] implements grouping, workers and checks.

        Args:
            regime: "multi_stream", or "iid" for independent blocks.
        """

    @abstractmethod
    def evaluate(self, model: PreTrainedModel, share: EvaluationShare) -> dict[str, float]:
        """Sums over a share of the held-out data, to be added over all shares; keeps the model's mode."""

    @abstractmethod
    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics from the sums over all shares: `loss` in nats per target, `bits_per_byte`, `accuracy`, …"""

    def check_model(self, argument: str, model: PreTrainedModel, window: int | None = None) -> None:
        """Raise a ValueError that names `argument` if `model` cannot read this source.

        Args:
            window: T in the evaluation of a model without a state, or None.
        """
        if self.vocab_size > model.config.vocab_size:
            raise ValueError(
                f"`{argument}` {self.name!r} has {self.vocab_size} token ids, but the model's vocabulary has only "
                f"{model.config.vocab_size}."
            )
        check_window("eval_block_size", window, model)

    def check_training(self, args: TrainingArguments, carries_state: bool) -> None:
        """Raise a ValueError if training with `args` has no end or does not suit these episodes."""
        if math.isinf(self.tokens_per_epoch) and args.max_steps <= 0 and not args.train_bytes:
            raise ValueError(f"`train_corpus` {self.name!r} is endless; give `max_steps` or `train_bytes`.")

    def count_training(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """Counts of a block for [`training_metrics`], a vector on its device; None for none.

        Args:
            logits: (B, T, V).
            labels: (B, T); -100 is ignored.
        """
        return None

    def training_metrics(self, counts: Sequence[float]) -> dict[str, float]:
        """Logged metrics from the summed counts since the last log."""
        return {}

    def first_anchor(self, context_length: int) -> int:
        """First position of a block that can have a memory in SMT: 0 if blocks begin with an episode."""
        return context_length

    def held_out_blocks(self, num_blocks: int, block_size: int) -> dict[str, torch.Tensor]:
        """Fixed held-out blocks: `input_ids`, `shift_labels` and `reset_mask`, each (num_blocks, T)."""
        batch = next(iter(self.blocks(num_blocks, block_size, seed=0, regime="iid")))
        return {name: batch[name] for name in ("input_ids", "shift_labels", "reset_mask")}

    def limit(self, max_tokens: int) -> "EpisodeSource":
        """A fixed part of the held-out data with at most `max_tokens`."""
        return self

    def describe(self, held_out: bool = False) -> str:
        """Size in words, for reports and model cards."""
        size = "endless" if math.isinf(self.tokens_per_epoch) else f"{self.tokens_per_epoch:,}"
        return f"{size} {self.unit}s"

    def describe_result(self, metrics: dict[str, Any]) -> str:
        """Evaluation metrics in words, with the size of the held-out data if the metrics have it."""
        return ", ".join(f"{value:.4g} {name.replace('_', ' ')}" for name, value in metrics.items())


def position_limit(model: PreTrainedModel) -> float:
    """Maximum number of positions of a model; `math.inf` for a recurrent one."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return math.inf if limit is None or supports_recurrent_state(model) else limit


def check_window(argument: str, window: int | None, model: PreTrainedModel) -> None:
    """Raise a ValueError if a window is longer than the maximum number of positions of a model."""
    if window is not None and window > position_limit(model):
        raise ValueError(f"`{argument}` is {window}; the model has {position_limit(model)} positions.")
