"""Six models on selective copying (Memora, section 5.1 and appendix F.1)."""

from collections.abc import Sequence
from typing import Any

from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.training import build_model, train_on_task

# Label → preset and recurrent unit.
MODELS = {
    "Llama2": ("llama-selective-copying", None),
    "Hawk": ("hawk-selective-copying", None),
    "Mamba2": ("mamba2-selective-copying", None),
    "Memora with minGRU": ("memora-selective-copying", "mingru"),
    "Memora with LRU": ("memora-selective-copying", "real_lru"),
    "Memora with GLRU": ("memora-selective-copying", "glru"),
}
SIZES: dict[str, Settings] = {
    "small": {
        "length": 512,
        "num_tokens": 4,
        "steps": 5000,
        "batch_size": 16,
        "learning_rate": 3e-3,
        "num_tested": 5000,
    },
    "paper": {
        "length": 4096,
        "num_tokens": 16,
        "steps": 50_000,
        "batch_size": 64,
        "learning_rate": 3e-4,
        "num_tested": 5000,
    },
}
# What replaces the presets' widths at the small size.
SMALL_WIDTHS: dict[str, Settings] = {
    "llama": {"hidden_size": 96, "intermediate_size": 256},
    # Shorter chunks take less time in plain torch (docs/log.md).
    "mamba2": {"hidden_size": 96, "num_heads": 3, "state_size": 64, "chunk_size": 64},
    "hawk": {"hidden_size": 32, "state_size": 128},
    "memora": {"hidden_size": 32, "state_size": 128},
}


class SelectiveCopyingTable(Experiment):
    name = "selective-copying"
    source = "Memora, Table 2"
    claim = (
        "Units that gate both their input and their memory solve selective copying; minGRU, which gates them "
        "together, and LRU, which gates nothing, fall far behind at equal steps."
    )
    metric = "accuracy"
    percent = True
    paper = {  # noqa: RUF012 (read only)
        "Llama2": "98.5 ± 0.9",
        "Hawk": "99.0 ± 0.4",
        "Mamba2": "99.4 ± 0.4",
        "Memora with minGRU": "53.8 ± 12.5",
        "Memora with LRU": "11.0 ± 0.7",
        "Memora with GLRU": "99.6 ± 0.2",
    }

    def rows(self, size: str) -> list[Settings]:
        return [
            {
                "label": label,
                "preset": preset,
                "widths": (SMALL_WIDTHS[preset.split("-")[0]] if size == "small" else {})
                | ({} if unit is None else {"recurrent_unit": unit}),
                **SIZES[size],
            }
            for label, (preset, unit) in MODELS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        from hf_recurrent import SelectiveCopying, evaluate_task

        task = SelectiveCopying(
            length=settings["length"], num_tokens=settings["num_tokens"], vocab_size=16, seed=settings["seed"]
        )
        model = build_model(settings["preset"], task.vocab_size, settings["seed"], **settings["widths"])
        results = train_on_task(model, task, settings)
        measured = evaluate_task(model, task, num_examples=settings["num_tested"])
        return {**results, "value": measured["accuracy"], "exact_match": measured["exact_match"]}

    def note(self, rows: Sequence[Settings]) -> str:
        row = rows[0]
        return (
            f"{row['num_tokens']} numbers among {row['length']} steps, {row['steps']:,} steps of "
            f"{row['batch_size']} examples, learning rate {row['learning_rate']:g}, {row['num_tested']:,} others "
            "to judge."
        )


EXPERIMENT = SelectiveCopyingTable()
