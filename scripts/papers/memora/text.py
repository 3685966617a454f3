"""Memora on text, trained in streams: with other recurrent units (Memora, section 5.6 and appendix F.7), against Hawk
with and without its convolution (section 5.2), and in windows that overlap (section 3: the rolling window)."""

from typing import Any

from hf_recurrent import RollingWindowTrainer, RollingWindowTrainingArguments
from papers.engine.experiment import Experiment, Settings
from papers.engine.training import CONSTANT_RATE, TINY_STORIES, train_in_streams

# Learning rates of the units at the small size; the paper has one for all.
UNIT_RATES = (1e-3, 3e-3, 1e-2)
HAWK_RATES = {"small": (1e-3, 3e-3, 1e-2), "paper": (1e-4, 3e-4, 1e-3)}
HAWK_MODELS: dict[str, Settings] = {
    "Memora": {"preset": "memora-tiny", "fields": {}},
    "Hawk": {"preset": "hawk-tiny", "fields": {}},
    "Hawk without convolution": {"preset": "hawk-tiny", "fields": {"conv_kernel": 1}},
}
_WIDTHS = {"hidden_size": 64, "state_size": 96, "num_hidden_layers": 2}
# Appendix F.2.
_PAPER_WIDTHS = {"hidden_size": 512, "state_size": 768, "num_hidden_layers": 14}
# At the small size also a wider model, and more data.
CONDITIONS: dict[str, Settings] = {
    "": {},
    ", wider": {"widths": {"hidden_size": 96, "state_size": 144, "num_hidden_layers": 2}},
    ", twice the data": {"bytes": 1_000_000},
}
EQUAL_BYTES, EQUAL_UPDATES = "equal bytes", "equal updates"
OVERLAPS = (1, 2, 4)  # T / S


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
            **_WIDTHS, "bytes": 1_500_000, "streams": 32, "block_size": 64, "corpus": "python", "eval_bytes": 200_000,
            "candidates": [{"learning_rate": rate} for rate in UNIT_RATES],
        },
        "paper": {
            "hidden_size": 512, "state_size": 768, "num_hidden_layers": 12, "learning_rate": 3e-4,
            "epochs": 2.0, "streams": 256, "block_size": 512, "arguments": CONSTANT_RATE, **TINY_STORIES,
        },
    }  # fmt: skip
    tuning = {"small": {"bytes": 250_000, "eval_bytes": 100_000}}

    def run(self, settings: Settings) -> dict[str, Any]:
        widths = {key: settings[key] for key in (*_WIDTHS, "recurrent_unit")}
        return train_in_streams("memora-tiny", widths, settings, settings["block_size"])


class HawkAblation(Experiment):
    sizes = {
        "small": {
            "widths": _WIDTHS, "bytes": 500_000, "streams": 64, "block_size": 32,
            "corpus": "python", "eval_bytes": 100_000,
        },
        "paper": {
            "widths": _PAPER_WIDTHS, "bytes": 4_000_000_000, "streams": 4096, "block_size": 32,
            "corpus": "hub:roneneldan/TinyStories", "eval_bytes": 10_000_000,
        },
    }  # fmt: skip
    tuning = {"small": {"bytes": 150_000, "eval_bytes": 100_000}, "paper": {"bytes": 400_000_000}}

    def rows(self, size: str) -> list[Settings]:
        candidates = [{"learning_rate": rate} for rate in HAWK_RATES[size]]
        conditions = CONDITIONS if size == "small" else {"": {}}
        return [
            {"label": label + name, "candidates": candidates, **self.size_settings(size), **model, **condition}
            for name, condition in conditions.items()
            for label, model in HAWK_MODELS.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        fields = {**settings["widths"], **settings["fields"]}
        return train_in_streams(settings["preset"], fields, settings, settings["block_size"])


class RollingWindow(Experiment):
    """Windows of T bytes, S bytes apart."""

    sizes = {
        "small": {
            "preset": "memora-tiny", "widths": _WIDTHS, "bytes": 1_000_000, "streams": 64, "window": 64,
            "learning_rate": 3e-3, "corpus": "python", "eval_bytes": 200_000,
        },
        "paper": {
            "preset": "memora-tinystories", "widths": _PAPER_WIDTHS, "bytes": 4_000_000_000, "streams": 1024,
            "window": 128, "learning_rate": 3e-4, "arguments": CONSTANT_RATE, **TINY_STORIES,
        },
    }  # fmt: skip

    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size)
        shares = {EQUAL_BYTES: (1, 1, 1), EQUAL_UPDATES: OVERLAPS}
        return [
            {"label": budget, "overlap": overlap, **shared, "bytes": shared["bytes"] // share}
            for budget, divisors in shares.items()
            for overlap, share in zip(OVERLAPS, divisors, strict=True)
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        return train_in_streams(
            settings["preset"],
            settings["widths"],
            settings,
            settings["window"] // settings["overlap"],
            RollingWindowTrainer,
            RollingWindowTrainingArguments,
            window=settings["window"],
        )
