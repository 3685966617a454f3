"""Six models on selective copying (Memora, section 5.1 and appendix F.1)."""

from typing import Any

from hf_recurrent import SelectiveCopying, evaluate_task
from papers.engine.experiment import Experiment, Settings
from papers.engine.training import CONSTANT_RATE, build_model, train_on_task

# Label → preset, recurrent unit, accuracy in the paper.
MODELS = {
    "Llama2": ("llama-selective-copying", None, "98.5 ± 0.9"),
    "Hawk": ("hawk-selective-copying", None, "99.0 ± 0.4"),
    "Mamba2": ("mamba2-selective-copying", None, "99.4 ± 0.4"),
    "Memora with minGRU": ("memora-selective-copying", "mingru", "53.8 ± 12.5"),
    "Memora with LRU": ("memora-selective-copying", "real_lru", "11.0 ± 0.7"),
    "Memora with GLRU": ("memora-selective-copying", "glru", "99.6 ± 0.2"),
}
# At the small size these replace the presets' widths.
SMALL_WIDTHS: dict[str, Settings] = {
    "llama": {"hidden_size": 72, "intermediate_size": 144},
    # Shorter chunks take less time in plain torch (docs/log.md).
    "mamba2": {"hidden_size": 64, "num_heads": 2, "state_size": 32, "chunk_size": 64},
    "hawk": {"hidden_size": 32, "state_size": 128},
    "memora": {"hidden_size": 32, "state_size": 128},
}


class SelectiveCopyingTable(Experiment):
    paper = {label: printed for label, (_, _, printed) in MODELS.items()}
    shared = {"num_tested": 5000}
    sizes = {
        "small": {
            # Shorter sequences and fewer steps do not tell GLRU from minGRU (docs/log.md).
            "length": 256, "num_tokens": 4, "steps": 2500, "batch_size": 16, "learning_rate": 3e-3, "num_tested": 1000,
        },
        "paper": {
            "length": 4096, "num_tokens": 16, "steps": 50_000, "batch_size": 64, "learning_rate": 3e-4,
            "arguments": CONSTANT_RATE,
        },
    }  # fmt: skip

    def rows(self, size: str) -> list[Settings]:
        rows = []
        for label, (preset, unit, _) in MODELS.items():
            widths = SMALL_WIDTHS[preset.split("-")[0]] if size == "small" else {}
            widths = widths if unit is None else widths | {"recurrent_unit": unit}
            rows.append({"label": label, "preset": preset, "widths": widths, **self.size_settings(size)})
        return rows

    def run(self, settings: Settings) -> dict[str, Any]:
        sizes = {key: settings[key] for key in ("length", "num_tokens", "seed")}
        task = SelectiveCopying(vocab_size=16, **sizes)
        model = build_model(settings["preset"], task.vocab_size, settings["seed"], **settings["widths"])
        results = train_on_task(model, task, settings)
        measured = evaluate_task(model, task, num_examples=settings["num_tested"])
        return {**results, "value": measured["accuracy"], "exact_match": measured["exact_match"]}
