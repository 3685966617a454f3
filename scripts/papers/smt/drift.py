"""Drift of an RNN from its teacher before and after DMT, by the weights of SMT's losses (SMT, section 3.6)."""

import statistics
from collections.abc import Sequence
from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import split_axes
from papers.smt.models import SMT, SMT_DMT
from papers.smt.tasks import SIZES, train_on_task

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
