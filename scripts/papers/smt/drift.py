"""An RNN and its teacher after SMT and DMT: drift by the weights of the losses, and longer sequences than in training
(SMT, sections 3.6 and 3.7)."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from hf_recurrent import SmtRnnForCausalLM, SmtTeacherModel, Task, evaluate_task, measure_memories
from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import split_axes
from papers.smt.models import BPTT, SMT, SMT_DMT, TEACHER
from papers.smt.tasks import LONG, SIZES, train_on_task
from papers.smt.training import learning_rates

# λ_dyn, λ_unif; the paper's choice first.
WEIGHTS = ((0.1, 0.001), (0.01, 0.001), (1.0, 0.001), (0.1, 0.0), (0.1, 0.01))
_MOMENTS = {SMT: "measured_smt", SMT_DMT: "measured"}


class DriftBeforeAndAfter(Experiment):
    lines = {
        f"λ_dyn {dynamics:g}, λ_unif {uniformity:g}": {
            "smt": {"dynamics_weight": dynamics, "uniformity_weight": uniformity}
        }
        for dynamics, uniformity in WEIGHTS
    }
    shared = {"method": SMT_DMT}
    sizes = {
        "small": SIZES["small"]
        | {"task": "stack_operations,vocab_size=4,max_depth=3,length=12", "steps": 600, "dmt_steps": 150},
        "paper": SIZES["paper"] | {"task": "stack_operations,length=64"},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        results, _, _ = train_on_task(settings)
        return {**results, "value": {kind: results[name]["drift"] for kind, name in _MOMENTS.items()}}

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        before, after = _means(rows, "accuracy")
        return {
            **super().details(rows),
            "accuracy before → after DMT": f"{before:.1%} → {after:.1%}",
            "of the teacher": f"{_means(rows, 'teacher_accuracy')[-1]:.1%}",
        }

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """The three parts of the paper's figure: drift, accuracy, and drift against one-step drift in all seeds."""
        panels = split_axes(axes, 1, 3, (12, 4))
        labels = {"drift": self.metric, "accuracy": "accuracy of answers"}
        for panel, (measure, label) in zip(panels, labels.items(), strict=False):
            for line in dict.fromkeys(row["label"] for row in rows):
                of_line = [row for row in rows if row["label"] == line]
                panel.plot(list(_MOMENTS), _means(of_line, measure), "o-", label=line)
            panel.set(ylabel=label)
        panels[0].legend(fontsize="small")
        for kind, name in _MOMENTS.items():
            panels[2].scatter(*([row[name][part] for row in rows] for part in ("one_step_drift", "drift")), label=kind)
        panels[2].set(xlabel="drift of one step from the teacher's memory", ylabel=self.metric)
        panels[2].legend(fontsize="small")


def _means(rows: Sequence[Settings], measure: str) -> list[float]:
    """Means over the rows before and after DMT."""
    return [statistics.fmean(row[name][measure] for row in rows) for name in _MOMENTS.values()]


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
