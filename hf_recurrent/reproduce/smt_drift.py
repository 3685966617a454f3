"""Drift of an RNN from its teacher before and after DMT, by the weights of SMT's losses (SMT, section 3.6)."""

from collections.abc import Iterator, Sequence
from typing import Any

from hf_recurrent.reproduce import smt_tasks
from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.smt_sizes import SMT, SMT_DMT

# λ_dyn, λ_unif; the paper's choice first.
WEIGHTS = ((0.1, 0.001), (0.01, 0.001), (1.0, 0.001), (0.1, 0.0), (0.1, 0.01))
TASK = {"small": "stack_operations,vocab_size=4,max_depth=3,length=12", "paper": "stack_operations,length=64"}
STEPS = {"small": {"steps": 600, "dmt_steps": 150}, "paper": {}}
_MOMENTS = {SMT: "measured_smt", SMT_DMT: "measured"}


class DriftBeforeAndAfter(Experiment):
    name = "smt-drift"
    source = "SMT, section 3.6, impact of DMT"
    claim = (
        "An RNN that runs on its own memories drifts from its teacher's after SMT; DMT lowers the drift and raises "
        "the accuracy with all weights of the losses."
    )
    metric = "drift 1 - R² of the memories"

    def rows(self, size: str) -> list[Settings]:
        shared = {"method": SMT_DMT, "task": TASK[size], **smt_tasks.WITHOUT_BPTT[size], **STEPS[size]}
        return [
            {
                "label": f"λ_dyn {dynamics:g}, λ_unif {uniformity:g}",
                "smt": {"dynamics_weight": dynamics, "uniformity_weight": uniformity},
                **shared,
            }
            for dynamics, uniformity in WEIGHTS
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, _, _ = smt_tasks.train_on_task(settings)
        return {**results, "value": {kind: results[name]["drift"] for kind, name in _MOMENTS.items()}}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for kind, value in row["value"].items():
            yield f"{row['label']}, {kind}", None, value

    def draw(self, axes: Any, rows: Sequence[Settings]) -> bool:
        """The three parts of the paper's figure: drift, accuracy, and drift against that of one step."""
        from hf_recurrent.reproduce.smt_pictures import split_axes

        panels = split_axes(axes, 1, 3, (12, 4))
        for panel, measure in zip(panels, ("drift", "accuracy"), strict=False):
            for row in rows:
                panel.plot(
                    list(_MOMENTS), [row[name][measure] for name in _MOMENTS.values()], "o-", label=row["label"]
                )
            panel.set(ylabel=self.metric if measure == "drift" else smt_tasks.SyntheticTasks.metric)
        panels[0].legend(fontsize="small")
        for kind, name in _MOMENTS.items():
            panels[2].scatter(*([row[name][part] for row in rows] for part in ("one_step_drift", "drift")), label=kind)
        panels[2].set(xlabel="drift of one step from the teacher's memory", ylabel=self.metric)
        panels[2].legend(fontsize="small")
        return True

    def note(self, rows: Sequence[Settings]) -> str:
        from hf_recurrent.reproduce.smt_training import training_words

        cells = (
            f"{row['label']}: {row['measured_smt']['accuracy']:.1%} → {row['measured']['accuracy']:.1%} "
            f"(teacher {row['measured']['teacher_accuracy']:.1%})"
            for row in rows
        )
        return f"`{rows[0]['task']}`, {training_words(rows[0])}. Accuracy before → after DMT: {'; '.join(cells)}."


EXPERIMENT = DriftBeforeAndAfter()
