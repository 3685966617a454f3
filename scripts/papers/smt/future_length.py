"""Length of the future that a memory predicts, with and without gradients of the dynamics in the teacher (SMT,
section 3.6)."""

from collections.abc import Sequence
from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import mean_points
from papers.smt.models import SMT_DMT
from papers.smt.tasks import SIZES as TASK_SIZES
from papers.smt.tasks import train_on_task
from papers.smt.training import method_values

FUTURES = {"small": (1, 8), "paper": (1, 2, 4, 8, 16, 32, 64)}
SIZES: dict[str, Settings] = {
    # With a short future few timesteps contain the answer, so all are used.
    "small": {"task": "retrieval,vocab_size=8,length=8", "steps": 1500, "dmt_steps": 300, "timesteps": 0},
    "paper": {"task": "retrieval,length=64"},
}


class FutureLength(Experiment):
    def rows(self, size: str) -> list[Settings]:
        shared = {"method": SMT_DMT, **TASK_SIZES[size], **SIZES[size]}
        return [
            {"label": kind, "x": length, "future_length": length, "smt": {"detached": kind == "detached"}, **shared}
            for kind in ("joint", "detached")
            for length in FUTURES[size]
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, _, _ = train_on_task(settings)
        return {**results, "value": method_values(results, "accuracy")}

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        drifts = mean_points((row["x"], row["measured_smt"]["drift"]) for row in rows)
        return {**super().details(rows), "drift before DMT": ", ".join(f"{drift:.3f}" for _, drift in drifts)}
