"""`Task`: base class of generated tasks, whose examples have a fixed length and a target or none at each step."""

import hashlib
import json
import math
import re
import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel, TrainingArguments

from hf_recurrent.data.block_dataset import BlockDataset
from hf_recurrent.data.episode_source import EpisodeSource, EvaluationShare, position_limit
from hf_recurrent.data.quantities import count_of
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.tasks.answers import count_answers, summarize_answers
from hf_recurrent.tasks.example_draws import SPLITS, ExampleDraws, check_integer
from hf_recurrent.tasks.task_streams import TaskStreams


@dataclass(frozen=True, kw_only=True)
class Task(EpisodeSource):
    """Base class of tasks over token ids. A task is immutable, and its examples depend on its fields only.

    Example i of a split is a pure function of (fields, split, i). Splits are independent samples of one distribution;
    if a task has few different examples (short parity), splits can overlap.

    A task is an [`EpisodeSource`] for the trainers (`MultiStreamTrainer(model, args, task, task)`). [`examples`] gives
    NumPy arrays.

    Args:
        seed: any integer; another seed gives other examples.
        num_examples: number of training examples, in a new order each epoch; None for endlessly many.
        num_validation_examples: number of examples of the split "validation" that an evaluation reads by default.

    Raises:
        ValueError: a field, also of a subclass, is out of its range.
    """

    seed: int = 0
    num_examples: int | None = None
    num_validation_examples: int = 1024

    unit = "symbol"
    least: ClassVar[dict[str, int]] = {}
    """Integer fields of a subclass and the smallest value of each, which `__post_init__` checks."""

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def __post_init__(self) -> None:
        for field, least in {"num_validation_examples": 1, **self.least}.items():
            check_integer(field, getattr(self, field), least)
        if self.num_examples is not None:
            check_integer("num_examples", self.num_examples, 1)

    @property
    def episode_length(self) -> int:
        return self.length

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V; ids of inputs and targets are below it."""

    @property
    @abstractmethod
    def length(self) -> int:
        """T, number of steps of an example."""

    @abstractmethod
    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, both (B, T) integers, of the B examples with these random numbers."""

    def token_name(self, token_id: int) -> str:
        """Name of a token in `show`."""
        return str(token_id)

    def examples(self, indices: np.ndarray, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
        """Generate examples by number.

        Args:
            indices: (B,) integers of at least 0.
            split: "train", "validation" or "test".

        Returns:
            `input_ids` and `targets`, both (B, T) int64. `targets[:, t]` is the label of the output at step t, without
            a shift; -100 for none.

        Raises:
            ValueError: the split is unknown, or an index negative.
        """
        inputs, targets = self.generate(ExampleDraws(self.seed, split, indices))
        return inputs.astype(np.int64, copy=False), targets.astype(np.int64, copy=False)

    def default_size(self, split: str) -> int | None:
        """Number of examples of a split; None for endlessly many."""
        return self.num_examples if split == SPLITS[0] else self.num_validation_examples

    def show(self, index: int = 0, split: str = "train") -> str:
        """One example in two lines: the inputs, and below each its target (a dot for none)."""
        inputs, targets = self.examples(np.array([index]), split)
        read = [self.token_name(token) for token in inputs[0].tolist()]
        asked = ["." if token == IGNORE_INDEX else self.token_name(token) for token in targets[0].tolist()]
        widths = [max(len(above), len(below)) for above, below in zip(read, asked, strict=True)]
        rows = [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (read, asked)]
        return f"reads {rows[0]}\nasked {rows[1]}"

    def __len__(self) -> int:
        """Number of examples of an epoch; `sys.maxsize` for endlessly many."""
        return self.num_examples or sys.maxsize

    @property
    def tokens_per_epoch(self) -> int | float:
        return math.inf if self.num_examples is None else self.num_examples * self.length

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the name and all fields."""
        content = json.dumps({"task": self.name, **asdict(self)}, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    # ---- As a source of episodes ----

    def blocks(
        self, num_streams: int, block_size: int, seed: int = 0, *, regime: str = "multi_stream", **options: Any
    ) -> BlockDataset:
        """[`TaskStreams`] in every regime, because examples are independent."""
        return TaskStreams(self, num_streams, block_size, seed, **options)

    def check_model(self, argument: str, model: PreTrainedModel, window: int | None = None) -> None:
        super().check_model(argument, model)
        if self.length > (limit := position_limit(model)):
            raise ValueError(f"{self.name!r} has examples of {self.length} steps; the model has {limit} positions.")

    def check_training(self, args: TrainingArguments, carries_state: bool) -> None:
        super().check_training(args, carries_state)
        if not carries_state and args.block_size != self.length:
            raise ValueError(
                f"`block_size` is {args.block_size}, but the examples of {self.name!r} have {self.length} steps; the "
                "two must be equal where no state is carried from block to block."
            )

    def evaluate(self, model: PreTrainedModel, share: EvaluationShare) -> dict[str, float]:
        """Sums of [`count_answers`] over the split "validation"."""
        indices = np.arange(share.index, self.num_validation_examples, share.count)
        return count_answers(model, self, indices, batch_size=share.batch_size, block_size=share.block_size)

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return summarize_answers(sums)

    def count_training(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(number of right answers, number of answers)."""
        return torch.stack([(logits.argmax(-1) == labels).sum(), labels.ne(IGNORE_INDEX).sum()])

    def training_metrics(self, counts: Sequence[float]) -> dict[str, float]:
        right, answers = counts
        return {"accuracy": right / max(answers, 1)}

    def first_anchor(self, context_length: int) -> int:
        return 0

    def held_out_blocks(self, num_blocks: int, block_size: int) -> dict[str, torch.Tensor]:
        """Whole examples of the split "validation"; `block_size` is ignored."""
        inputs, labels = map(torch.from_numpy, self.examples(np.arange(num_blocks), split="validation"))
        resets = torch.zeros_like(inputs, dtype=torch.bool)
        resets[:, 0] = True
        return {"input_ids": inputs, "shift_labels": labels, "reset_mask": resets}

    def limit(self, max_tokens: int) -> "Task":
        """The same task with at most `max_tokens` of whole validation examples, and at least one example."""
        most = max(int(max_tokens // self.length), 1)
        return replace(self, num_validation_examples=min(self.num_validation_examples, most))

    def describe(self, held_out: bool = False) -> str:
        count = self.num_validation_examples if held_out else self.num_examples
        examples = "endless examples" if count is None else count_of(count, "example")
        return f"{examples} of {count_of(self.length, 'symbol')}"

    def describe_result(self, metrics: dict[str, Any]) -> str:
        examples = (
            count_of(metrics["num_examples"], "held-out example") if "num_examples" in metrics else "the examples"
        )
        right = f"{metrics['accuracy']:.1%} of the answers right, {metrics['exact_match']:.1%} of {examples}"
        return f"{right}, {metrics['bits_per_symbol']:.3f} bits per symbol"


def targets_at_end(inputs: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Targets (B, T) for inputs (B, T): the answers (B, n) at the last n steps, none before."""
    targets = np.full_like(inputs, IGNORE_INDEX)
    targets[:, -answers.shape[1] :] = answers
    return targets
