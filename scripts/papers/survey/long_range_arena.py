"""Attention, state spaces and recurrent units on tasks of the Long Range Arena (survey, section 7.8, Table 7)."""

from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.labelled_sequences import DATA, train_and_test
from papers.engine.training import new_classifier

_RING = {"r_min": 0.9, "r_max": 0.999}
# Label → preset and its options. Initial weights of the Transformer for narrow layers, as in the table of recall.
MODELS: dict[str, dict[str, tuple[str, Settings]]] = {
    "small": {
        "Transformer (Llama)": (
            "llama-s0", {"intermediate_size": 192, "num_attention_heads": 2, "initializer_range": 0.2}
        ),
        "S5 (s5 unit)": ("lru-tiny", {"state_size": 64, "recurrent_unit": "s5"}),
        "LRU": ("lru-tiny", {"state_size": 64} | _RING),
        "Memora with GLRU": ("memora-tiny", {"state_size": 64}),
        "Hawk": ("hawk-tiny", {"state_size": 64}),
    },
    "paper": {
        "Transformer (Llama)": ("llama-s2", {}),
        "S5 (s5 unit)": ("lru-tiny", {"state_size": 256, "recurrent_unit": "s5"}),
        "LRU": ("lru-tiny", {"state_size": 256} | _RING),
        "Memora with GLRU": ("memora-s2", {}),
        "Hawk": ("hawk-s2", {}),
    },
}  # fmt: skip
_WIDTHS = {
    "small": {"hidden_size": 48, "num_hidden_layers": 2},
    "paper": {"hidden_size": 256, "num_hidden_layers": 6},
}
# Task → its data and the fields of its models. Grey levels are tokens; 256 stands for no level.
TASKS: dict[str, tuple[str, Settings, Settings]] = {
    "ListOps": ("list_ops", {}, {"vocab_size": 16, "num_labels": 10}),
    "text": ("texts", {}, {"vocab_size": 256, "num_labels": 2}),
    "image": ("pixels", {"as_ids": True}, {"vocab_size": 257, "pad_token_id": 256, "num_labels": 10}),
}
# Of the papers behind the table, in their own sizes: the sizes of the online experiment.
_EPOCHS = {
    "ListOps": {"epochs": 35, "batch_size": 32},
    "text": {"epochs": 40, "batch_size": 32},
    "image": {"epochs": 180, "batch_size": 100, "dataset": "cifar"},
}
# Table 7.
PRINTED = {
    "ListOps": {"Transformer (Llama)": "36.37", "S5 (s5 unit)": "62.15", "LRU": "60.2"},
    "text": {"Transformer (Llama)": "64.27", "S5 (s5 unit)": "89.31", "LRU": "89.4"},
    "image": {"Transformer (Llama)": "42.44", "S5 (s5 unit)": "88.00", "LRU": "89.0"},
}


class LongRangeArena(Experiment):
    paper = {f"{task}: {label}": number for task, row in PRINTED.items() for label, number in row.items()}
    shared = {"weight_decay": 0.05, "warmup_share": 0.1}
    sizes = {
        "small": {"steps": 300, "batch_size": 32, "num_tested": 1000},
        "paper": {"num_tested": 2000},
    }
    tuning = {"small": {"steps": 100}}

    def rows(self, size: str) -> list[Settings]:
        rates = (1e-3, 4e-3) if size == "small" else (1e-3, 3e-3)
        return [
            {
                "label": f"{task}: {label}",
                "preset": preset,
                "options": fields | _WIDTHS[size] | options,
                "candidates": [{"learning_rate": rate} for rate in rates],
                **self.size_settings(size),
                **DATA[size][kind],
                **own,
                **(_EPOCHS[task] if size == "paper" else {}),
            }
            for task, (kind, own, fields) in TASKS.items()
            for label, (preset, options) in MODELS[size].items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        return train_and_test(new_classifier(settings), settings)
