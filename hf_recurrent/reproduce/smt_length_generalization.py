"""An RNN and its teacher on longer sequences than they were trained on (SMT, section 3.7)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hf_recurrent.reproduce import smt_tasks
from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.smt_sizes import BPTT, SMT_DMT, TEACHER

TASK = {"small": "stack_operations,vocab_size=4,max_depth=3,length=16", "paper": "stack_operations,length=64"}
STEPS = {"small": smt_tasks.LONG | {"num_tested": 200}, "paper": {"num_tested": 500}}
# How many times longer.
FACTORS = (1, 2, 4, 8)


class LengthGeneralization(Experiment):
    name = "smt-length-generalization"
    source = "SMT, section 3.7, sequence length"
    claim = (
        "At the training length the teacher answers at least as well as the RNN that it taught; on longer sequences "
        "the RNN is far better."
    )
    metric = "accuracy of answers"
    x_label = "T ="
    logarithmic = True
    percent = True

    def rows(self, size: str) -> list[Settings]:
        shared = {"task": TASK[size], **smt_tasks.SIZES[size], **STEPS[size], "factors": list(FACTORS)}
        return [{"label": method, "method": method, **shared} for method in (SMT_DMT, BPTT)]

    def run(self, settings: Settings) -> dict[str, Any]:
        from dataclasses import replace

        from hf_recurrent import evaluate_task

        results, (rnn, teacher), task = smt_tasks.train_on_task(settings)
        value, teacher_value = {}, {}
        for factor in settings["factors"]:
            longer = replace(task, length=factor * task.length)
            value[str(longer.length)] = evaluate_task(rnn, longer, batch_size=32)["accuracy"]
            if settings["method"] == SMT_DMT:
                teacher_value[str(longer.length)] = teacher_accuracy(rnn, teacher, longer)
        return {**results, "value": value, "teacher_value": teacher_value}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        yield from super().points(row)
        for length, accuracy in row["teacher_value"].items():
            yield TEACHER, length, accuracy

    def note(self, rows: Sequence[Settings]) -> str:
        from hf_recurrent.reproduce.smt_training import training_words

        return (
            f"Trained on `{rows[0]['task']}`, {training_words(rows[0])}; {rows[0]['num_tested']} examples of each "
            "length to judge, for the teacher at 64 positions at most. Its context is the whole sequence."
        )


def teacher_accuracy(rnn: Any, teacher: Any, task: Any) -> float:
    """Share of the answers that a teacher gives from its memory of all that was read."""
    from hf_recurrent.trainers.smt.metrics import measure_memories

    inputs, targets = (
        torch.from_numpy(part) for part in task.examples(np.arange(task.num_validation_examples), "validation")
    )
    resets = torch.zeros_like(inputs, dtype=torch.bool)
    resets[:, 0] = True
    options = {"start": 0, "context_length": task.length}
    return measure_memories(rnn, teacher, inputs, targets, resets, **options)["teacher_accuracy"]


EXPERIMENT = LengthGeneralization()
