"""Memora with other recurrent units on text (Memora, section 5.6 and appendix F.7)."""

from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.training import CONSTANT_RATE, train_in_streams

# At the small size; the paper has one rate for all units.
RATES = (1e-3, 3e-3, 1e-2)


class GLRUAlternatives(Experiment):
    lines = {
        "real GLRU": {"recurrent_unit": "glru"},
        "complex GLRU": {"recurrent_unit": "complex_glru_read_out"},
        "restricted complex GLRU": {"recurrent_unit": "complex_glru_conjugate_read_out"},
        "minGRU": {"recurrent_unit": "mingru"},
        "real LRU": {"recurrent_unit": "real_lru"},
        "complex LRU": {"recurrent_unit": "complex_lru"},
        "restricted complex LRU": {"recurrent_unit": "complex_lru_conjugate"},
    }
    sizes = {
        "small": {
            "hidden_size": 64, "state_size": 96, "num_hidden_layers": 2,
            "bytes": 1_500_000, "streams": 32, "block_size": 64, "corpus": "python", "eval_bytes": 200_000,
        },
        "paper": {
            "hidden_size": 512, "state_size": 768, "num_hidden_layers": 12, "learning_rate": 3e-4,
            "epochs": 2.0, "streams": 256, "block_size": 512, "arguments": CONSTANT_RATE,
            "corpus": "hub:roneneldan/TinyStories", "held_out_split": "validation", "eval_bytes": 10_000_000,
        },
    }  # fmt: skip

    tuning = {"small": {"bytes": 250_000, "eval_bytes": 100_000}}

    def rows(self, size: str) -> list[Settings]:
        rows = super().rows(size)
        if size == "paper":
            return rows
        return [row | {"candidates": [{"learning_rate": rate} for rate in RATES]} for row in rows]

    def run(self, settings: Settings) -> dict[str, Any]:
        widths = {key: settings[key] for key in ("hidden_size", "state_size", "num_hidden_layers", "recurrent_unit")}
        return train_in_streams("memora-tiny", widths, settings)
