"""How well a model answers a task: whole examples from zero states, judged where something is asked."""

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_recurrent.bits_per_byte import supports_recurrent_state
from hf_recurrent.modeling.recurrent_state import detach_state
from hf_recurrent.tasks.example_draws import check_integer
from hf_recurrent.tasks.task import IGNORED, Task


def evaluate_task(
    model: PreTrainedModel,
    task: Task,
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
    check_integer("num_examples", size, 1)
    counts = count_answers(model, task, np.arange(size), batch_size=batch_size, block_size=block_size, split=split)
    return summarize_answers(counts)


def count_answers(
    model: PreTrainedModel,
    task: Task,
    indices: np.ndarray,
    *,
    batch_size: int = 64,
    block_size: int | None = None,
    split: str = "validation",
) -> dict[str, float | int]:
    """Sums over some examples, which add up over processes: `nats`, `right`, `answers`, `exact`, `examples`."""
    check_integer("batch_size", batch_size, 1)
    check_integer("block_size", task.length if block_size is None else block_size, 1)
    check_vocabulary("task", task, model)
    training = model.training
    model.eval()
    counts = {"nats": 0.0, "right": 0, "answers": 0, "exact": 0, "examples": len(indices)}
    try:
        with torch.inference_mode():
            for first in range(0, len(indices), batch_size):
                inputs, targets = (
                    torch.from_numpy(part).to(model.device)
                    for part in task.examples(indices[first : first + batch_size], split)
                )
                asked = targets != IGNORED
                right = torch.zeros_like(asked)
                for place, logits in _logits(model, inputs, block_size):
                    part = targets[:, place]
                    wide = logits if logits.dtype == torch.float64 else logits.float()
                    losses = F.cross_entropy(
                        wide.flatten(0, 1), part.flatten(), ignore_index=IGNORED, reduction="none"
                    )
                    counts["nats"] += losses.sum(dtype=torch.float64).item()
                    right[:, place] = logits.argmax(-1) == part
                counts["right"] += int(right.sum())
                counts["answers"] += int(asked.sum())
                counts["exact"] += int((right | ~asked).all(1).sum())
    finally:
        model.train(training)
    return counts


def summarize_answers(counts: dict[str, float | int]) -> dict[str, float | int]:
    """The measures of `evaluate_task` from the sums of `count_answers`."""
    answers = max(counts["answers"], 1)
    return {
        "accuracy": counts["right"] / answers,
        "exact_match": counts["exact"] / max(counts["examples"], 1),
        "loss": counts["nats"] / answers,
        "num_answers": int(counts["answers"]),
        "num_examples": int(counts["examples"]),
    }


def check_vocabulary(argument: str, task: Task, model: PreTrainedModel) -> None:
    """Raise a ValueError where a task has more ids than the model's vocabulary."""
    if task.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"`{argument}` {task.name!r} has {task.vocab_size} token ids, but the model's vocabulary has only "
            f"{model.config.vocab_size}."
        )


def _logits(model: PreTrainedModel, inputs: torch.Tensor, block_size: int | None):
    """(steps, logits) of one piece of the examples (B, T) after another."""
    if not supports_recurrent_state(model):
        yield slice(0, inputs.shape[1]), model(input_ids=inputs, use_cache=False).logits
        return
    state, size = None, block_size or inputs.shape[1]
    for begin in range(0, inputs.shape[1], size):
        place = slice(begin, min(begin + size, inputs.shape[1]))
        output = model(input_ids=inputs[:, place], state=state, use_cache=True)
        state = detach_state(output.state)
        yield place, output.logits
