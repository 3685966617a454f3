"""Noise, size of the memory, depth and length of associations in the synthetic tasks, and length of the future that a
memory predicts (SMT, sections 3.1 and 3.6)."""

from collections.abc import Iterator, Sequence
from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import mean_points
from papers.smt.models import SMT_DMT
from papers.smt.tasks import SIZES, train_on_task
from papers.smt.training import MethodComparison, learning_rates, method_values

# Sweep → size → (value, task, memory tokens or None for the default). The paper prints its values in figures only.
SWEEPS: dict[str, dict[str, list[tuple[float, str, int | None]]]] = {
    "retrieval, label noise": {
        "small": [(p, f"retrieval,vocab_size=8,length=8,label_noise={p}", None) for p in (0.0, 0.4)],
        "paper": [(p, f"retrieval,length=64,label_noise={p}", None) for p in (0.0, 0.1, 0.2, 0.4)],
    },
    "string copy, memory tokens": {
        "small": [(n, "string_copy,vocab_size=4,length=6", n) for n in (1, 4)],
        "paper": [(n, "string_copy,length=64", n) for n in (4, 8, 16, 32)],
    },
    "stack operations, depth": {
        "small": [(n, f"stack_operations,vocab_size=4,max_depth={n},length=8", None) for n in (1, 4)],
        "paper": [(n, f"stack_operations,max_depth={n},length=64", None) for n in (4, 8, 16)],
    },
    "keys-values, tokens of a key and of a value": {
        "small": [(n, f"keys_values,vocab_size=9,num_pairs=2,key_length={n},value_length={n}", None) for n in (1, 2)],
        "paper": [(n, f"keys_values,num_pairs=8,key_length={n},value_length={n}", None) for n in (1, 2, 4)],
    },
}
FUTURES = {"small": (1, 8), "paper": (1, 2, 4, 8, 16, 32, 64)}
FUTURE_SIZES: dict[str, Settings] = {
    # With a short future few timesteps contain the answer, so all are used.
    "small": {"task": "retrieval,vocab_size=8,length=8", "steps": 1500, "dmt_steps": 300, "timesteps": 0},
    "paper": {"task": "retrieval,length=64"},
}


class TaskSweeps(MethodComparison):
    tuning = {
        "small": {"steps": 150, "dmt_steps": 40, "num_tested": 300},
        "paper": {"steps": 6700, "dmt_steps": 500},
    }

    def rows(self, size: str) -> list[Settings]:
        shared = SIZES[size] | ({"steps": 600, "dmt_steps": 150} if size == "small" else {})
        return [
            {
                "label": f"{name} {value:g}: {method}",
                "sweep": name,
                "swept": value,
                "task": task,
                **shared,
                **own,
                "sizes": shared["sizes"] | ({"num_memory_tokens": tokens} if tokens else {}),
                "candidates": learning_rates(method, size, shared),
            }
            for name, sizes in SWEEPS.items()
            for value, task, tokens in sizes[size]
            for method, own in self.lines.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, _, _ = train_on_task(settings)
        return {**results, "value": method_values(results, "accuracy")}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for kind, accuracy in row["value"].items():
            yield row["label"].rpartition(": ")[0] + f": {kind}", None, accuracy

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        self.draw_sweeps(axes, rows, "sweep", ylim=(0, 105))


class FutureLength(Experiment):
    def rows(self, size: str) -> list[Settings]:
        shared = {"method": SMT_DMT, **SIZES[size], **FUTURE_SIZES[size]}
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
