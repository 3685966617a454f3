"""How much future a memory has to predict, with and without gradients of the dynamics in the teacher (SMT, section
3.6)."""

from collections.abc import Iterator, Sequence
from typing import Any

from hf_recurrent.reproduce import smt_tasks
from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.smt_sizes import SMT, SMT_DMT, TEACHER

TASK = {"small": "retrieval,vocab_size=8,length=8", "paper": "retrieval,length=64"}
FUTURES = {"small": (1, 2, 4, 8), "paper": (1, 2, 4, 8, 16, 32, 64)}
# Of a short future few timesteps see the answer, so all are used.
STEPS = {"small": {"steps": 1500, "dmt_steps": 300, "timesteps": 0}, "paper": {}}


class FutureLength(Experiment):
    name = "smt-future-length"
    source = "SMT, section 3.6, future length"
    claim = (
        "Retrieval takes a future long enough to hold the answer or joint training, in which credit goes back a step "
        "of the sequence with each optimizer step; detached and with a short future it fails."
    )
    metric = "accuracy of answers"
    x_label = "Tf ="
    logarithmic = True
    percent = True

    def rows(self, size: str) -> list[Settings]:
        shared = {"method": SMT_DMT, "task": TASK[size], **smt_tasks.WITHOUT_BPTT[size], **STEPS[size]}
        return [
            {"label": kind, "x": length, "future_length": length, "smt": {"detached": kind == "detached"}, **shared}
            for kind in ("joint", "detached")
            for length in FUTURES[size]
        ]

    def row_name(self, settings: Settings) -> str:
        return f"{settings['label']}, Tf = {settings['x']}"

    def run(self, settings: Settings) -> dict[str, Any]:
        results, _, _ = smt_tasks.train_on_task(settings)
        return {**results, "value": smt_tasks.accuracies(results)}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for kind, value in row["value"].items():
            yield f"{row['label']}, {kind}", row["x"], value

    def line_style(self, label: str) -> dict[str, Any]:
        kind = label.rpartition(", ")[2]
        colour = "tab:blue" if label.startswith("joint") else "tab:orange"
        return {"color": colour, "linestyle": {SMT_DMT: "-", SMT: "--", TEACHER: ":"}[kind]}

    def note(self, rows: Sequence[Settings]) -> str:
        from hf_recurrent.reproduce.smt_training import training_words

        drifts = [f"{self.row_name(row)} {row['measured_smt']['drift']:.3f}" for row in rows]
        return f"`{rows[0]['task']}`, {training_words(rows[0])}. Drift before DMT: {'; '.join(drifts)}."


EXPERIMENT = FutureLength()
