"""Copying of strings: examples needed, and longer strings than in training (survey, section 7.8, Figure 20)."""

import statistics
from collections.abc import Sequence
from typing import Any

from hf_recurrent import SentinelCopy, evaluate_task
from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import split_axes
from papers.engine.training import build_model, logged, train_on_task
from papers.survey.recall import LLAMA, MAMBA2, RECURRENT

# Angles of all positions are zero to rounding, so that attention knows of no positions but by its mask.
_NO_POSITIONS = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 1e9}}
# With two heads and the rate of the table of recall, attention did not begin in 64,000 examples (docs/log.md).
_LLAMA = LLAMA | {"num_attention_heads": 4, "initializer_range": 0.1}
# Label → family, and fields of both sizes.
MODELS: dict[str, tuple[str, Settings]] = {
    "Llama, RoPE": ("llama", {}),
    "Llama, no positions": ("llama", _NO_POSITIONS),
    "Mamba2": ("mamba2", {}),
    "Hawk": ("hawk", {}),
    "Memora with GLRU": ("memora", {"recurrent_unit": "glru"}),
}
# Family → settings of the small size; its model of the paper's size is S4.
SMALL: dict[str, Settings] = {
    "llama": {"widths": _LLAMA, "learning_rate": 3e-3},
    "mamba2": {"widths": MAMBA2},
    "hawk": {"widths": RECURRENT},
    "memora": {"widths": RECURRENT},
}
# Evaluations during training.
EVALUATIONS = 10
LEARNED = 0.9


class StringCopying(Experiment):
    sizes = {
        "small": {
            "min_length": 2, "max_length": 6, "lengths": [3, 6, 8, 10, 12],
            "steps": 1200, "batch_size": 64, "learning_rate": 2e-3, "num_tested": 300,
        },
        "paper": {
            "min_length": 1, "max_length": 50, "lengths": [25, 50, 100, 300, 1000],
            "steps": 20_000, "batch_size": 64, "learning_rate": 1e-3, "num_tested": 500,
        },
    }  # fmt: skip

    def rows(self, size: str) -> list[Settings]:
        shared, is_small = self.size_settings(size), size == "small"
        return [
            {
                "label": label,
                **shared,
                "preset": f"{family}-{'s0' if is_small else 's4'}",
                "fields": fields,
                **(SMALL[family] if is_small else {"widths": {}}),
            }
            for label, (family, fields) in MODELS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        seed, longest = settings["seed"], settings["max_length"]
        task = SentinelCopy(max_length=longest, min_length=settings["min_length"], seed=seed)
        fields = settings["widths"] | settings["fields"]
        model = build_model(settings["preset"], task.vocab_size, seed, **fields)
        between = max(settings["steps"] // EVALUATIONS, 1)
        results = train_on_task(
            model,
            task,
            settings,
            held_out=SentinelCopy(max_length=longest, seed=seed, num_validation_examples=settings["num_tested"]),
            measure=lambda trainer: {
                str(step * settings["batch_size"]): right
                for step, right in logged(trainer, "eval_exact_match").items()
            },
            eval_strategy="steps",
            eval_steps=between,
            per_device_eval_batch_size=100,
        )
        tested = {
            str(length): evaluate_task(
                model, SentinelCopy(max_length=length, seed=seed), num_examples=settings["num_tested"], batch_size=100
            )
            for length in settings["lengths"]
        }
        return {
            **results,
            "curve": results.pop("measured"),
            "value": {length: each["exact_match"] for length, each in tested.items()},
            "letters": {length: each["accuracy"] for length, each in tested.items()},
        }

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        letters = [f"{statistics.fmean(row['letters'][key] for row in rows) * 100:.1f}" for key in rows[0]["letters"]]
        return {"letters": ", ".join(letters), "examples": examples_needed(rows), **super().details(rows)}

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        left, right = split_axes(axes, 1, 2, (10, 4.2))
        for label in dict.fromkeys(row["label"] for row in rows):
            same = [row for row in rows if row["label"] == label]
            (line,) = left.plot(*means([row["curve"] for row in same]), marker="o", label=label)
            right.plot(*means([row["value"] for row in same]), marker="o", color=line.get_color())
            right.plot(*means([row["letters"] for row in same]), ":", color=line.get_color())
        longest = rows[0]["max_length"]
        left.set(xlabel="training examples", ylabel=f"strings of {longest} letters without an error (%)")
        right.set(xlabel="length of strings", ylabel="without an error; dotted: letters (%)")
        right.axvspan(rows[0]["min_length"], longest, alpha=0.1, color="black")
        right.set_title("shaded: lengths of training", fontsize="small")
        left.legend(fontsize="small")


def means(curves: Sequence[dict[str, float]]) -> tuple[list[float], list[float]]:
    """Places and the means in per cent over the curves of several seeds."""
    places = list(curves[0])
    averages = [100 * statistics.fmean(curve[place] for curve in curves) for place in places]
    return [float(place) for place in places], averages


def examples_needed(rows: Sequence[Settings]) -> str:
    """Range over the seeds of the examples after which nine of ten strings were right."""
    firsts = [next((int(place) for place, value in row["curve"].items() if value >= LEARNED), None) for row in rows]
    found = sorted(first for first in firsts if first is not None)
    never = f"never in {len(firsts) - len(found)} of {len(firsts)}"
    if not found:
        return "never"
    reached = f"{found[0]:,}" if found[0] == found[-1] else f"{found[0]:,} to {found[-1]:,}"
    return reached if len(found) == len(firsts) else f"{reached}; {never}"
