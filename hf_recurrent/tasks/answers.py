"""Accuracy of a model on a task: whole examples, each from a zero state, at the steps that have a target.

Shape letters: B streams or batch, T steps.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_recurrent.data.episode_losses import evaluation_mode
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_state import detach_state, supports_recurrent_state, upcast
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.tasks.example_draws import check_integer

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
                losses = F.cross_entropy(upcast(logits).flatten(0, 1), part.flatten(), reduction="none")
                counts["nats"] += losses.sum(dtype=torch.float64).item()
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
