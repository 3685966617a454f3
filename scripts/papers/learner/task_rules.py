"""Flip-flop and copying as one stream of bytes, learned by rule and optimizer, tested on other examples."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_recurrent import Copying, FlipFlop, OnlineLearner
from papers.engine.experiment import Experiment, Settings
from papers.engine.tables import core_seconds, in_interval
from papers.engine.training import build_model, measured_run
from papers.learner.drift import RULES, rule_settings

TASKS: dict[str, Settings] = {
    "flip-flop": {"length": 64, "p_ignore": 0.8},
    "copying": {"num_tokens": 5, "delay": 5, "num_symbols": 4},
}
_DIGIT = ord("0")
# The recurrence of a GRU mixes channels, so SnAp-1 is not exact; GLRU has the rules of `drift-rules`.
UNITS: dict[str, dict[str, Settings]] = {
    "glru": RULES,
    "gru": {
        "SnAp-1, AdamW": rule_settings("snap1", 1, "adamw"),
        **{label: rule for label, rule in RULES.items() if rule["rule"] == "truncated"},
    },
}


class TaskRules(Experiment):
    shared = {"preset": "memora-tiny", "num_tested": 500}
    sizes = {
        "small": {"stream_bytes": 20_000, "fields": {"hidden_size": 64, "state_size": 96}},
        "paper": {"stream_bytes": 1_000_000, "fields": {"hidden_size": 256, "state_size": 384}},
    }
    tuning = {"small": {"stream_bytes": 8000}, "paper": {"stream_bytes": 100_000}}

    def rows(self, size: str) -> list[Settings]:
        return [
            {
                "label": f"{task}: {unit.upper()}, {label}", "task": task, "task_options": options, "unit": unit,
                **rule,
                **self.size_settings(size),
            }
            for task, options in TASKS.items()
            for unit, rules in UNITS.items()
            for label, rule in rules.items()
        ]  # fmt: skip

    def run(self, settings: Settings) -> dict[str, Any]:
        model = build_model(
            settings["preset"], 256, settings["seed"], **settings["fields"], recurrent_unit=settings["unit"]
        )
        fields = ("rule", "stride", "optimizer", "learning_rate", "update_every")
        learner = OnlineLearner(model, window=1000, **{key: settings[key] for key in fields if key in settings})
        stream = itertools.islice(task_bytes(settings), settings["stream_bytes"])
        with measured_run() as record:
            for _ in learner.learn(bytes(stream), 1000):
                pass
        accuracy, bits = measure(model, settings)
        return {"value": accuracy, "bits": bits, "num_parameters": model.num_parameters(), **record}

    def tuning_loss(self, row: Settings) -> float:
        return row["bits"]

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        seconds = statistics.fmean(map(core_seconds, rows))
        return {"bits, 95 % interval": in_interval([row["bits"] for row in rows]), "core seconds": f"{seconds:.1f}"}


def task_examples(settings: Settings, indices: Sequence[int], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of examples (B, T), and where the next byte is what the task asks for."""
    kind = {"flip-flop": FlipFlop, "copying": Copying}[settings["task"]]
    task = kind(**settings["task_options"], seed=settings["seed"])
    inputs, targets = task.examples(np.asarray(indices), split)
    asked = targets >= 0
    if settings["task"] == "copying":  # the answer is read after one marker, as any text is
        inputs = np.concatenate([inputs[:, : -task.num_tokens + 1], inputs[:, : task.num_tokens]], 1)
        asked = np.pad(asked, ((0, 0), (0, 1)))
    return inputs + _DIGIT, asked


def task_bytes(settings: Settings) -> itertools.chain:
    """The endless stream of training examples, an end byte after each."""
    blocks = (task_examples(settings, range(first, first + 100), "train")[0] for first in itertools.count(0, 100))
    return itertools.chain.from_iterable(bytes(row.astype(np.uint8)) + b"\0" for block in blocks for row in block)


@torch.no_grad()
def measure(model: Any, settings: Settings) -> tuple[float, float]:
    """Accuracy, and mean bits of what is asked, on examples that were not learned from."""
    split = "validation" if settings.get("is_tuning") else "test"
    inputs, asked = task_examples(settings, range(settings["num_tested"]), split)
    ids, asked = torch.from_numpy(inputs), torch.from_numpy(asked[:, :-1])
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[asked]
    targets = ids[:, 1:][asked]
    bits = torch.nn.functional.cross_entropy(logits.double(), targets) / np.log(2)
    return (logits.argmax(-1) == targets).double().mean().item(), float(bits)
