"""Accuracy of a model on a task: whole examples, each from a zero state."""

from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from hf_recurrent.tasks.task import Task


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
        nats per answer; `num_answers` and `num_examples`.

    Raises:
        ValueError: a number is below 1, or the task's ids are outside the model's vocabulary.
    """
    size = task.default_size(split) if num_examples is None else num_examples
    if size is None or size < 1:
        raise ValueError(f"`num_examples` is {size}; for the task {task.name!r}, it must be an integer of at least 1.")
    task.check_model("task", model)
    counts = task.count_answers(model, np.arange(size), batch_size=batch_size, block_size=block_size, split=split)
    return task.evaluation_metrics(counts)
