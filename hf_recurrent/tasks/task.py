"""What all generated tasks have in common: examples of fixed length, each with what is asked at each step."""

import hashlib
import json
import math
import re
import sys
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hf_recurrent.tasks.example_draws import SPLITS, ExampleDraws, check_integer

if TYPE_CHECKING:
    from hf_recurrent.tasks.task_dataset import TaskDataset

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Base class of tasks over token ids. A task is a value: its fields are all that its examples depend on.

    Example i of a split is a pure function of (fields, seed, split, i). Splits share nothing but the distribution;
    where a task has few different examples (short parity), the same one may turn up in several.

    A task stands wherever a trainer takes a corpus (`MultiStreamTrainer(model, args, task, task)`), gives a map-style
    data set for any other (`dataset`), and plain arrays for everything else (`examples`).

    Args:
        seed: any integer; another seed gives other examples.
        num_examples: how many different examples training has, seen in a new order each epoch; None for an endless
            row of new ones.
        num_validation_examples: how many of the split "validation" an evaluation reads when nothing else is said.

    Raises:
        ValueError: a number out of its range.
    """

    seed: int = 0
    num_examples: int | None = None
    num_validation_examples: int = 1024

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def __post_init__(self) -> None:
        if self.num_examples is not None:
            check_integer("num_examples", self.num_examples, 1)
        check_integer("num_validation_examples", self.num_validation_examples, 1)

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """V, ids of inputs and targets are below it."""

    @property
    @abstractmethod
    def length(self) -> int:
        """T, steps of an example."""

    @abstractmethod
    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the n examples whose random numbers these are, both (n, T) integers."""

    def token_name(self, token_id: int) -> str:
        """A token as `show` writes it."""
        return str(token_id)

    def examples(self, indices: np.ndarray, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
        """Examples by number.

        Args:
            indices: (n,) integers of at least 0.
            split: "train", "validation" or "test".

        Returns:
            `input_ids` (n, T) and `targets` (n, T), int64: a target stands at the step whose output it is (nothing is
            to be shifted), and is -100 where nothing is asked.

        Raises:
            ValueError: an unknown split or a negative index.
        """
        inputs, targets = self.generate(ExampleDraws(self.seed, split, indices))
        return inputs.astype(np.int64, copy=False), targets.astype(np.int64, copy=False)

    def dataset(self, num_examples: int | None = None, split: str = "train") -> "TaskDataset":
        """The first examples of a split as a map-style data set for `transformers.Trainer`, see [`TaskDataset`]."""
        from hf_recurrent.tasks.task_dataset import TaskDataset

        return TaskDataset(self, num_examples, split)

    def default_size(self, split: str) -> int | None:
        """How many examples a split has; None for no end."""
        return self.num_examples if split == SPLITS[0] else self.num_validation_examples

    def show(self, index: int = 0, split: str = "train") -> str:
        """One example in two rows: the tokens read, and below each what is asked there (a dot for nothing)."""
        inputs, targets = self.examples(np.array([index]), split)
        read = [self.token_name(token) for token in inputs[0].tolist()]
        asked = ["." if token == IGNORED else self.token_name(token) for token in targets[0].tolist()]
        widths = [max(len(above), len(below)) for above, below in zip(read, asked, strict=True)]
        rows = [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (read, asked)]
        return f"reads {rows[0]}\nasked {rows[1]}"

    def __len__(self) -> int:
        """Examples of an epoch; the largest length there is where they do not end."""
        return self.num_examples or sys.maxsize

    @property
    def num_bytes(self) -> int | float:
        """Tokens of an epoch, what a corpus calls its bytes; infinite where examples do not end."""
        return math.inf if self.num_examples is None else self.num_examples * self.length

    @cached_property
    def fingerprint(self) -> str:
        """Tells this task from any other, and from the same with another seed or size."""
        content = json.dumps({"task": self.name, **asdict(self)}, sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
