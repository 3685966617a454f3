"""How well a model answers a task: whole examples from zero states, judged where something is asked."""

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
    """Answers of `model` to the first examples of a split.

    Every example is read whole from a zero state. A recurrent model reads it in blocks with the state carried, which
    changes the memory and not the result (beyond rounding); any other model reads it at once.

    Args:
        model: a causal language model over the task's ids; it runs where it is and in its own type.
        task: what is asked.
        num_examples: how many; by default `task.num_validation_examples` (of "train", `task.num_examples`).
        batch_size: B, examples read side by side.
        block_size: T of a recurrent model, by default whole examples.
        split: "train", "validation" or "test".

    Returns:
        `accuracy`, the share of right answers; `exact_match`, the share of examples with all answers right; `loss`,
        nats per answer; `num_answers` and `num_examples`.

    Raises:
        ValueError: a number below 1, or ids that do not fit the model.
    """
    size = task.default_size(split) if num_examples is None else num_examples
    if size is None:
        raise ValueError(f"num_examples is None, but the task {task.name!r} is endless; give a number")
    if size < 1:
        raise ValueError(f"`num_examples` is {size}; it must be at least 1.")
    task.check_model("task", model)
    counts = task.count_answers(model, np.arange(size), batch_size=batch_size, block_size=block_size, split=split)
    return task.evaluation_metrics(counts)
