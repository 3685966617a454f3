"""Five synthetic tasks: BPTT against SMT→DMT at equal optimizer steps (SMT, section 3.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hf_recurrent import ModularArithmetic, Task, task_from_name
from papers.engine.experiment import Curves, Settings
from papers.engine.pictures import split_axes
from papers.smt.models import PAPER_MODEL, SMALL_MODEL, Pair
from papers.smt.training import MethodComparison, learning_rates, method_values, train_on

# At the small size, for tasks in which more than one thing has to be remembered.
LONG: Settings = {"steps": 1200, "dmt_steps": 400}
# Where also every step is an answer, the teacher needs more timesteps of a sequence and more steps (docs/log.md).
_DENSE = LONG | {"dmt_steps": 250, "timesteps": 16}
# Size → task → its name with each length, and its own settings.
TASKS: dict[str, dict[str, tuple[list[str], Settings]]] = {
    "small": {
        "retrieval": ([f"retrieval,vocab_size=8,length={n}" for n in (8, 24)], {}),
        "string copy": (["string_copy,vocab_size=4,length=8"], LONG),
        "stack operations": (["stack_operations,vocab_size=4,max_depth=3,length=8"], _DENSE),
        "keys-values": (["keys_values,vocab_size=9,num_pairs=3"], LONG),
        "modular arithmetic": (["modular_arithmetic,vocab_size=5,max_a=2,max_b=2,num_shots=4"], _DENSE),
    },
    "paper": {
        "retrieval": ([f"retrieval,length={n}" for n in (32, 64, 128, 256)], {}),
        "string copy": ([f"string_copy,length={n}" for n in (32, 64, 128)], {}),
        "stack operations": ([f"stack_operations,length={n}" for n in (32, 64, 128)], {}),
        "keys-values": ([f"keys_values,num_pairs={n}" for n in (4, 8, 16)], {}),
        "modular arithmetic": ([f"modular_arithmetic,num_shots={n}" for n in (8, 16, 32)], {}),
    },
}
SIZES: dict[str, Settings] = {
    "small": {
        "sizes": SMALL_MODEL, "steps": 1500, "dmt_steps": 300, "batch_size": 32,
        "learning_rate": 5e-3, "dmt_learning_rate": 3e-3,
        "timesteps": 4, "dmt_timesteps": 16, "eval_windows": 256, "num_tested": 1000,
    },
    "paper": {
        "sizes": PAPER_MODEL, "steps": 20_000, "dmt_steps": 1500, "batch_size": 32,
        "learning_rate": 3e-4, "dmt_learning_rate": 3e-5,
        "timesteps": 0, "dmt_timesteps": 0, "eval_windows": 256, "num_tested": 5000,
    },
}  # fmt: skip


class SyntheticTasks(MethodComparison):
    tuning = {
        "small": {"steps": 600, "dmt_steps": 150, "num_tested": 300},
        "paper": {"steps": 6700, "dmt_steps": 500},
    }

    def rows(self, size: str) -> list[Settings]:
        return [
            {
                "label": f"{name}, {method}",
                "x": task_from_name(task).length,
                "task": task,
                "candidates": learning_rates(method, size, SIZES[size]),
                **own,
                **SIZES[size],
                **special,
            }
            for name, (tasks, special) in TASKS[size].items()
            for task in tasks
            for method, own in self.lines.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, _, task = train_on_task(settings)
        if isinstance(task, ModularArithmetic):
            inputs, targets = task.examples(np.arange(settings["num_tested"]), "validation")
            asked = targets >= 0
            results["best_possible"] = float((best_answers(task, inputs) == targets)[asked].mean())
        return {**results, "value": method_values(results, "accuracy")}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        name = row["label"].rpartition(", ")[0]
        for kind, accuracy in row["value"].items():
            yield f"{name}, {kind}", row["x"], accuracy

    def curves(self, rows: Sequence[Settings]) -> Curves:
        return dict(sorted(super().curves(rows).items(), key=lambda item: item[0].rpartition(", ")[0]))

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        best = {row["x"]: f"{row['best_possible'] * 100:.1f}" for row in rows if "best_possible" in row}
        return {**super().details(rows), **({"best possible": ", ".join(best.values())} if best else {})}

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        names = list(dict.fromkeys(row["label"].rpartition(", ")[0] for row in rows))
        for panel, name in zip(split_axes(axes, 1, len(names), (4 * len(names), 4)), names, strict=True):
            super().draw(panel, [row for row in rows if row["label"].startswith(f"{name}, ")])
            panel.set(title=name, ylim=(0, 105))


def train_on_task(settings: Settings) -> tuple[dict[str, Any], Pair, Task]:
    """Train an RNN on a row's `task` by its `method` at Tc = Tf = T.

    Args:
        settings: a row with settings of training, `num_tested`, and `smt` and `future_length` to change the defaults.

    Returns:
        Results, (RNN, teacher), task.
    """
    named = task_from_name(settings["task"])
    task = replace(named, seed=settings["seed"], num_validation_examples=settings["num_tested"])
    lengths = {"context_length": task.length, "future_length": settings.get("future_length", task.length)}
    places = {key: min(settings[key], task.length) for key in ("timesteps", "dmt_timesteps")}
    return *train_on(task, settings | places, lengths), task


def best_answers(task: ModularArithmetic, inputs: np.ndarray) -> np.ndarray:
    """The most probable target given all tokens so far: (B, T) → (B, T), -100 where there is no target.

    No model exceeds its accuracy on average; the first target is little better than a guess.
    """
    a, b = (grid.ravel() for grid in np.mgrid[: task.max_a + 1, : task.max_b + 1])
    possible = np.ones((len(inputs), len(a)), dtype=bool)
    best = np.full_like(inputs, -100)
    for step in range(0, task.length, 2):
        values = (a * inputs[:, step, None] + b) % task.vocab_size
        counts = np.zeros((len(inputs), task.vocab_size), dtype=np.int64)
        np.add.at(counts, (np.arange(len(inputs))[:, None], values), possible)
        best[:, step] = counts.argmax(axis=1)
        possible &= values == inputs[:, step + 1, None]
    return best
