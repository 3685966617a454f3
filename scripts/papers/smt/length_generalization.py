"""An RNN and its teacher on longer sequences than in training (SMT, section 3.7)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_recurrent import SmtRnnForCausalLM, SmtTeacherModel, Task, evaluate_task, measure_memories
from papers.engine.experiment import Experiment, Settings
from papers.smt.models import BPTT, SMT_DMT, TEACHER
from papers.smt.tasks import LONG, SIZES, train_on_task
from papers.smt.training import learning_rates


class LengthGeneralization(Experiment):
    lines = {SMT_DMT: {"method": SMT_DMT}, BPTT: {"method": BPTT}}
    shared = {"factors": [1, 2, 4, 8]}  # test lengths, as multiples of the training length
    sizes = {
        "small": SIZES["small"]
        | LONG
        | {"task": "stack_operations,vocab_size=4,max_depth=3,length=8", "num_tested": 200},
        "paper": SIZES["paper"] | {"task": "stack_operations,length=64", "num_tested": 500},
    }
    tuning = {
        "small": {"steps": 400, "dmt_steps": 130, "factors": [1]},
        "paper": {"steps": 6700, "dmt_steps": 500, "factors": [1]},
    }

    def rows(self, size: str) -> list[Settings]:
        return [row | {"candidates": learning_rates(row["method"], size, row)} for row in super().rows(size)]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, (rnn, teacher), task = train_on_task(settings)
        value, teacher_value = {}, {}
        for factor in settings["factors"]:
            longer = replace(task, length=factor * task.length)
            value[str(longer.length)] = evaluate_task(rnn, longer, batch_size=32)["accuracy"]
            if settings["method"] == SMT_DMT:
                teacher_value[str(longer.length)] = teacher_accuracy(rnn, teacher, longer)
        return {**results, "value": value, "teacher_value": teacher_value}

    def tuning_loss(self, row: Settings) -> float:
        return -row["value"][min(row["value"], key=int)]

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        yield from super().points(row)
        for length, accuracy in row["teacher_value"].items():
            yield TEACHER, length, accuracy


def teacher_accuracy(rnn: SmtRnnForCausalLM, teacher: SmtTeacherModel, task: Task) -> float:
    """Accuracy of a teacher's answers from its memory of all previous inputs."""
    examples = task.examples(np.arange(task.num_validation_examples), "validation")
    inputs, targets = (torch.from_numpy(part) for part in examples)
    resets = torch.zeros_like(inputs, dtype=torch.bool)
    resets[:, 0] = True
    options = {"start": 0, "context_length": task.length}
    return measure_memories(rnn, teacher, inputs, targets, resets, **options)["teacher_accuracy"]
