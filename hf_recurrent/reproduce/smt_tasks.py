"""Five synthetic tasks: BPTT against SMT→DMT at equal optimizer steps (SMT, section 3.1)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hf_recurrent.reproduce.experiment import Curves, Experiment, Settings
from hf_recurrent.reproduce.smt_sizes import BPTT, PAPER_MODEL, SMALL_MODEL, SMT, SMT_DMT, TEACHER

# Of the small size, where more than one thing has to be kept.
LONG: Settings = {"steps": 4000, "dmt_steps": 1500}
# And where every step is an answer: the teacher needs more timesteps of a sequence and more steps there (docs/log.md).
_LONG_AND_DENSE = LONG | {"dmt_steps": 800, "timesteps": 16}
# Size → task → its description at each length, and what is special to it.
TASKS: dict[str, dict[str, tuple[list[str], Settings]]] = {
    "small": {
        "retrieval": ([f"retrieval,vocab_size=8,length={length}" for length in (8, 16, 32, 64)], {}),
        "string copy": ([f"string_copy,vocab_size=4,length={length}" for length in (8, 12)], LONG),
        "stack operations": (
            [f"stack_operations,vocab_size=4,max_depth=3,length={length}" for length in (8, 16)],
            _LONG_AND_DENSE,
        ),
        "keys-values": ([f"keys_values,vocab_size=9,num_pairs={pairs}" for pairs in (2, 3)], LONG),
        "modular arithmetic": (
            [f"modular_arithmetic,vocab_size=5,max_a=2,max_b=2,num_shots={shots}" for shots in (4, 6)],
            _LONG_AND_DENSE,
        ),
    },
    "paper": {
        "retrieval": ([f"retrieval,length={length}" for length in (32, 64, 128, 256)], {}),
        "string copy": ([f"string_copy,length={length}" for length in (32, 64, 128)], {}),
        "stack operations": ([f"stack_operations,length={length}" for length in (32, 64, 128)], {}),
        "keys-values": ([f"keys_values,num_pairs={pairs}" for pairs in (4, 8, 16)], {}),
        "modular arithmetic": ([f"modular_arithmetic,num_shots={shots}" for shots in (8, 16, 32)], {}),
    },
}
SIZES: dict[str, Settings] = {
    "small": {
        "sizes": SMALL_MODEL,
        "steps": 1500,
        "dmt_steps": 300,
        "batch_size": 32,
        "learning_rate": 5e-3,
        "dmt_learning_rate": 3e-3,
        "bptt_learning_rates": [1e-3, 3e-3],
        "timesteps": 4,
        "dmt_timesteps": 16,
        "eval_windows": 256,
        "num_tested": 1000,
    },
    "paper": {
        "sizes": PAPER_MODEL,
        "steps": 20_000,
        "dmt_steps": 1500,
        "batch_size": 32,
        "learning_rate": 3e-4,
        "dmt_learning_rate": 3e-5,
        "bptt_learning_rates": [1e-4, 3e-4, 1e-3],
        "timesteps": 0,
        "dmt_timesteps": 0,
        "eval_windows": 256,
        "num_tested": 5000,
    },
}
WITHOUT_BPTT: dict[str, Settings] = {
    size: {key: value for key, value in settings.items() if not key.startswith("bptt")}
    for size, settings in SIZES.items()
}
_SOLVED = 0.95
_COLOURS = {SMT_DMT: "tab:blue", SMT: "tab:cyan", TEACHER: "tab:gray", BPTT: "tab:red"}


class SyntheticTasks(Experiment):
    name = "smt-tasks"
    source = "SMT, section 3.1, synthetic tasks"
    claim = (
        "At equal optimizer steps an RNN after SMT→DMT answers at least as well as one after BPTT on each of the five "
        "tasks, and the longer the sequence, the larger the difference."
    )
    metric = "accuracy of answers"
    x_label = "T ="
    percent = True

    def rows(self, size: str) -> list[Settings]:
        from hf_recurrent.tasks.task_names import task_from_name

        return [
            {
                "label": f"{name}, {method}",
                "x": task_from_name(task).length,
                "task": task,
                "method": method,
                **SIZES[size],
                **special,
            }
            for name, (tasks, special) in TASKS[size].items()
            for task in tasks
            for method in (BPTT, SMT_DMT)
        ]

    def row_name(self, settings: Settings) -> str:
        return f"{settings['label']}, T = {settings['x']}"

    def run(self, settings: Settings) -> dict[str, Any]:
        results, _, task = train_on_task(settings)
        value = {BPTT: results["measured"]["accuracy"]} if settings["method"] == BPTT else accuracies(results)
        if hasattr(task, "best_answers"):
            inputs, targets = task.examples(np.arange(settings["num_tested"]), "validation")
            asked = targets >= 0
            results["best_possible"] = float((task.best_answers(inputs) == targets)[asked].mean())
        return {**results, "value": value}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        name = row["label"].rpartition(", ")[0]
        for kind, accuracy in row["value"].items():
            yield f"{name}, {kind}", row["x"], accuracy

    def curves(self, rows: Sequence[Settings]) -> Curves:
        return dict(sorted(super().curves(rows).items(), key=lambda item: item[0].rpartition(", ")[0]))

    def line_style(self, label: str) -> dict[str, Any]:
        kind = label.rpartition(", ")[2]
        return {"color": _COLOURS[kind], "linestyle": ":" if kind in (SMT, TEACHER) else "-"}

    def draw(self, axes: Any, rows: Sequence[Settings]) -> bool:
        from hf_recurrent.reproduce.report import draw_table
        from hf_recurrent.reproduce.smt_pictures import split_axes

        names = list(dict.fromkeys(row["label"].rpartition(", ")[0] for row in rows))
        for panel, name in zip(split_axes(axes, 1, len(names), (4 * len(names), 4)), names, strict=True):
            draw_table(self, [row for row in rows if row["label"].startswith(f"{name}, ")], panel)
            panel.set(title=name, ylim=(0, 105))
        return True

    def note(self, rows: Sequence[Settings]) -> str:
        from hf_recurrent.reproduce.smt_training import cost_words, training_words

        row = rows[0]
        best = {row["x"]: row["best_possible"] for row in rows if "best_possible" in row}
        others: dict[str, list[str]] = {}
        for other in rows:
            if other["steps"] != row["steps"]:
                steps = (
                    f"{other['steps']:,} steps, DMT's {other['dmt_steps']:,}, SMT on {other['timesteps']} timesteps"
                )
                others.setdefault(steps, []).append(other["label"].rpartition(", ")[0])
        longer = [f"{steps}, for {', '.join(dict.fromkeys(names))}" for steps, names in others.items()]
        longest = max(row["x"] for row in rows)
        return (
            f"Transformer backbone, {training_words(row)}, Tc = Tf = T{''.join(f'; {words}' for words in longer)}. "
            f"{row['num_tested']:,} other examples to judge ({row['eval_windows']} for the teacher). "
            f"{solved_words(self.curves(rows))}"
            + (
                "In modular arithmetic, where the first answers are guesses, one who knows all odds has "
                if best
                else ""
            )
            + ", ".join(f"{accuracy:.1%} at T = {length}" for length, accuracy in best.items())
            + (". " if best else "")
            + cost_words([row for row in rows if row["x"] == longest])
        )


def train_on_task(settings: Settings) -> tuple[dict[str, Any], tuple[Any, Any], Any]:
    """Train an RNN on a row's `task` by its `method`, at Tc = T: results, (RNN, teacher), task. Of BPTT the best of
    several learning rates.

    Args:
        settings: those of a row; beside the ones of training `num_tested`, and `smt` and `future_length` where they
            are not the defaults.
    """
    from dataclasses import replace

    from hf_recurrent import task_from_name
    from hf_recurrent.reproduce.smt_training import build_pair, train_bptt, train_smt_dmt

    task = replace(
        task_from_name(settings["task"]), seed=settings["seed"], num_validation_examples=settings["num_tested"]
    )
    length = task.length
    if settings["method"] == BPTT:
        runs = []
        for rate in settings["bptt_learning_rates"]:
            pair = build_pair(settings["sizes"], task.vocab_size, settings["seed"])
            results = train_bptt(pair[0], task, task, {**settings, "bptt_learning_rate": rate}, block_size=length)
            runs.append(({**results, "bptt_learning_rate": rate}, pair))
        results, pair = max(runs, key=lambda run: run[0]["measured"]["accuracy"])
        return {**results, "seconds": round(sum(run["seconds"] for run, _ in runs), 2)}, pair, task
    rnn, teacher = pair = build_pair(settings["sizes"], task.vocab_size, settings["seed"])
    steps = {key: min(settings[key], length) for key in ("timesteps", "dmt_timesteps")}
    results = train_smt_dmt(
        rnn,
        teacher,
        task,
        task,
        {**settings, **steps},
        context_length=length,
        future_length=settings.get("future_length", length),
        rollout_length=length,
        smt=settings.get("smt"),
    )
    return results, pair, task


def accuracies(results: dict[str, Any]) -> dict[str, float]:
    """Those of an RNN behind DMT and before it, and of its teacher."""
    return {
        SMT_DMT: results["measured"]["accuracy"],
        SMT: results["measured_smt"]["accuracy"],
        TEACHER: results["measured"]["teacher_accuracy"],
    }


def solved_words(curves: Curves) -> str:
    """Up to which length of retrieval each method is right in 95 % of the answers."""
    words = []
    for method in (SMT_DMT, BPTT):
        line = curves.get(f"retrieval, {method}", {})
        solved = [length for length, values in sorted(line.items()) if sum(values) / len(values) >= _SOLVED]
        failed = [length for length in sorted(line) if length not in solved]
        if line:
            words.append(
                f"{method} "
                + (f"falls below at T = {failed[0]:g}" if failed else f"stays above to T = {max(solved):g}")
            )
    return f"Retrieval at 95 %: {', '.join(words)}. " if words else ""


EXPERIMENT = SyntheticTasks()
