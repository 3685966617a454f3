"""`Task`: base class of generated tasks, whose examples have a fixed length and a target or none at each step.

`TaskStreams` are its continuous streams of examples, in blocks of any length; `evaluate_task` scores answers.
"""

import hashlib
import json
import math
import re
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel, TrainingArguments

from hf_recurrent.argument_checks import check_integer
from hf_recurrent.data.block_dataset import Block, BlockDataset, worker_share
from hf_recurrent.data.document_order import DocumentOrder, hash_integers
from hf_recurrent.data.episode_losses import evaluation_mode, token_nats
from hf_recurrent.data.episode_source import EpisodeSource, EvaluationShare, position_limit
from hf_recurrent.data.quantities import count_of
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_state import detach_state, supports_recurrent_state
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.tasks.example_draws import SPLITS, ExampleDraws


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


def evaluate_task(
    model: PreTrainedModel,
    task: "Task",
    num_examples: int | None = None,
    batch_size: int = 64,
    *,
    block_size: int | None = None,
    split: str = "validation",
) -> dict[str, float | int]:
    """Evaluate the answers of `model` to the first examples of a split.

    A recurrent model reads each example in blocks with the state carried, other models at once. The block size changes
    the memory, not the result (beyond rounding).

    Args:
        model: a causal language model over the task's ids, on any device and of any type.
        task: the task.
        num_examples: by default `task.num_validation_examples` (of "train", `task.num_examples`).
        batch_size: B, examples read in parallel.
        block_size: T of a recurrent model, by default whole examples.
        split: "train", "validation" or "test".

    Returns:
        `accuracy`, the share of right answers; `exact_match`, the share of examples with all answers right; `loss`,
        nats per answer; `bits_per_symbol`, the same in bits; `num_answers` and `num_examples`.

    Raises:
        ValueError: a number is below 1, or the task's ids are outside the model's vocabulary.
    """
    size = task.default_size(split) if num_examples is None else num_examples
    if size is None or size < 1:
        raise ValueError(f"`num_examples` is {size}; for the task {task.name!r}, it must be an integer of at least 1.")
    task.check_model("task", model)
    counts = count_answers(model, task, np.arange(size), batch_size=batch_size, block_size=block_size, split=split)
    return summarize_answers(counts)


def count_answers(
    model: PreTrainedModel,
    task: "Task",
    indices: np.ndarray,
    *,
    batch_size: int = 64,
    block_size: int | None = None,
    split: str = "validation",
) -> dict[str, float | int]:
    """Sums over examples, to be added over processes: `nats`, `right`, `answers`, `exact`, `examples`."""
    check_integer("batch_size", batch_size, 1)
    check_integer("block_size", task.length if block_size is None else block_size, 1)
    counts = {"nats": 0.0, "right": 0, "answers": 0, "exact": 0, "examples": len(indices)}
    with evaluation_mode(model), torch.inference_mode():
        for first in range(0, len(indices), batch_size):
            inputs, targets = (
                torch.from_numpy(part).to(model.device)
                for part in task.examples(indices[first : first + batch_size], split)
            )
            asked = targets != IGNORE_INDEX
            right = torch.zeros_like(asked)
            for steps, logits in _logits(model, inputs, block_size):
                part = targets[:, steps]
                counts["nats"] += token_nats(logits, part).sum(dtype=torch.float64).item()
                right[:, steps] = logits.argmax(-1) == part
            counts["right"] += int(right.sum())
            counts["answers"] += int(asked.sum())
            counts["exact"] += int((right | ~asked).all(1).sum())
    return counts


def summarize_answers(counts: dict[str, float | int]) -> dict[str, float | int]:
    """Metrics of [`evaluate_task`] from the sums of [`count_answers`]."""
    answers = max(counts["answers"], 1)
    return {
        "accuracy": counts["right"] / answers,
        "exact_match": counts["exact"] / max(counts["examples"], 1),
        "loss": counts["nats"] / answers,
        "bits_per_symbol": counts["nats"] / math.log(2) / answers,
        "num_answers": int(counts["answers"]),
        "num_examples": int(counts["examples"]),
    }


def _logits(
    model: PreTrainedModel, inputs: torch.Tensor, block_size: int | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (steps, logits) of consecutive parts of the examples (B, T)."""
    if not supports_recurrent_state(with_state(model)):
        yield slice(0, inputs.shape[1]), model(input_ids=inputs, use_cache=False).logits
        return
    state, size = model.init_state(len(inputs)), block_size or inputs.shape[1]
    for begin in range(0, inputs.shape[1], size):
        steps = slice(begin, min(begin + size, inputs.shape[1]))
        output = model(input_ids=inputs[:, steps], state=state, use_cache=True)
        state = detach_state(output.state)
        yield steps, output.logits


_TOKENS_AHEAD = 1 << 18


class TaskStreams(BlockDataset):
    """Endless complete batches of a task's training examples; use `DataLoader(dataset, batch_size=None)`.

    Stream k of n reads the examples D[k], D[k+n], D[k+2n], …, each an episode with a reset at its first step. D is a
    seeded permutation per epoch if the task has `num_examples`; otherwise it is 0, 1, 2, …, or starts far from 0 for
    other seeds. With `block_size` = `task.length` a block is one example; other sizes cut examples, so the state must
    be carried.

    Batches have the keys of [`MultiStreamDataset`]; `shift_labels` are the targets, and `stream_positions` are
    (examples read, offset in the next). The examples of a stream depend on the task, n and the seed only.

    Args:
        corpus: the task.
        num_streams, block_size, seed, stream_indices, accumulation_groups, positions: see [`MultiStreamDataset`].

    Raises:
        ValueError: an argument is invalid, or the positions do not belong to this task.
    """

    corpus: "Task"

    def prepare(self) -> None:
        task = self.corpus
        for positions in self.group_positions:
            if (positions[:, 1] >= task.length).any():
                offset = int(positions[:, 1].max())
                raise ValueError(
                    f"`positions` has the offset {offset}, but examples of {task.name!r} have {task.length} steps; it "
                    "belongs to another task."
                )
        if task.num_examples is not None:
            self._order = DocumentOrder(task.num_examples, self.seed)
        else:
            # No run reads 2^40 examples, so the examples of different seeds do not overlap.
            beginning = int(hash_integers(self.seed)[0] >> np.uint64(42)) << 40 if self.seed else 0
            self._order = partial(np.add, beginning)

    def group_reader(self, group: int) -> "_GroupReader":
        return _GroupReader(self, group, alone=worker_share()[1] == 1)


class _GroupReader:
    """Reader of one group of streams, which generates several examples at a time."""

    def __init__(self, streams: TaskStreams, group: int, alone: bool) -> None:
        self._task, self._block_size = streams.corpus, streams.block_size
        self._order, self._num_streams = streams._order, streams.num_streams
        self._streams, positions = streams.stream_groups[group], streams.group_positions[group]
        length = self._task.length
        self._begin = positions[:, 0] * length + positions[:, 1]
        # Examples that a block can overlap; without other workers more, because larger batches are cheaper.
        self._window = (self._block_size + length - 2) // length + 1
        if alone:
            self._window = max(self._window, _TOKENS_AHEAD // (length * len(self._streams)))
        self._first = np.full(len(self._streams), -self._window - 1, dtype=np.int64)
        self._inputs = self._targets = np.empty((len(self._streams), 0), dtype=np.int64)

    def block(self, index: int) -> Block:
        """Block `index` of every stream of the group, counted from the positions."""
        length = self._task.length
        begin = self._begin + index * self._block_size
        end = begin + self._block_size
        if ((begin // length < self._first) | ((end - 1) // length >= self._first + self._window)).any():
            self._generate(begin // length)
        steps = (begin - self._first * length)[:, None] + np.arange(self._block_size)
        resets = steps % length == 0
        return Block(
            inputs=np.take_along_axis(self._inputs, steps, axis=1),
            targets=np.take_along_axis(self._targets, steps, axis=1),
            resets=resets,
            attended=np.ones_like(resets),
            positions=np.stack(np.divmod(end, length), axis=1),
        )

    def _generate(self, first: np.ndarray) -> None:
        """Generate the examples first, first + 1, … of every stream."""
        self._first = first
        numbers = first[:, None] + np.arange(self._window)
        ranks = self._streams[:, None] + numbers * self._num_streams
        inputs, targets = self._task.examples(self._order(ranks).ravel())
        self._inputs, self._targets = (part.reshape(len(first), -1) for part in (inputs, targets))
