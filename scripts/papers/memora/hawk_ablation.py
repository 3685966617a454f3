"""Memora against Hawk on text, and Hawk without its convolution (Memora, section 5.2)."""

from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.training import train_in_streams

MODELS: dict[str, Settings] = {
    "Memora": {"preset": "memora-tiny", "fields": {}},
    "Hawk": {"preset": "hawk-tiny", "fields": {}},
    "Hawk without convolution": {"preset": "hawk-tiny", "fields": {"conv_kernel": 1}},
}
# At the small size: a wider model, then more data.
_WIDTHS = {"hidden_size": 64, "state_size": 96, "num_hidden_layers": 2}
CONDITIONS: dict[str, Settings] = {
    "": {},
    ", wider": {"widths": {"hidden_size": 96, "state_size": 144, "num_hidden_layers": 2}},
    ", twice the data": {"bytes": 1_000_000},
}
RATES = {"small": (1e-3, 3e-3, 1e-2), "paper": (1e-4, 3e-4, 1e-3)}


class HawkAblation(Experiment):
    sizes = {
        "small": {
            "widths": _WIDTHS, "bytes": 500_000, "streams": 64, "block_size": 32,
            "corpus": "python", "eval_bytes": 100_000,
        },
        # Appendix F.2, at T = 32.
        "paper": {
            "widths": {"hidden_size": 512, "state_size": 768, "num_hidden_layers": 14}, "bytes": 4_000_000_000,
            "streams": 4096, "block_size": 32, "corpus": "hub:roneneldan/TinyStories", "eval_bytes": 10_000_000,
        },
    }  # fmt: skip
    tuning = {"small": {"bytes": 150_000, "eval_bytes": 100_000}, "paper": {"bytes": 400_000_000}}

    def rows(self, size: str) -> list[Settings]:
        candidates = [{"learning_rate": rate} for rate in RATES[size]]
        conditions = CONDITIONS if size == "small" else {"": {}}
        return [
            {"label": label + name, "candidates": candidates, **self.size_settings(size), **model, **condition}
            for name, condition in conditions.items()
            for label, model in MODELS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        return train_in_streams(settings["preset"], {**settings["widths"], **settings["fields"]}, settings)
