"""Online learning rules on the copy task (Online learning of long-range dependencies, section 4.2 and Table 1)."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import set_seed

from papers.engine.experiment import Experiment, Settings
from papers.online_learning.bit_copier import (
    WITHOUT_CLIPPING,
    BitCopier,
    CopiedBits,
    train_bit_copier,
)

_GRU = {"recurrent_unit": "gru", "recurrent_bias": True, "read_out": False}
# Label → fields of the configuration, and the width of a further readout (Table 5).
LAYERS: dict[str, tuple[Settings, int]] = {
    "LRU": ({"state_size": 128, "hidden_size": 128}, 0),
    "linear RNN": ({"recurrent_unit": "dense_linear", "state_size": 64, "hidden_size": 146}, 0),
    "GRU, 1 layer": (_GRU | {"state_size": 134, "hidden_size": 134, "num_hidden_layers": 1, "glu": False}, 1072),
    "GRU": (_GRU | {"state_size": 91, "hidden_size": 91}, 0),
}
RULES = {"spatial": "spatial", "truncated": "truncated", "ours": "rtrl", "SnAp-1": "snap1", "BPTT": "bptt"}
# Table 1: spatial, truncated, ours or SnAp-1, BPTT.
PRINTED = {
    "LRU": ("4.66e-1", "2.62e-1", "8.44e-3", "7.59e-6"),
    "linear RNN": ("6.20e-1", "5.81e-1", "5.82e-1", "1.07e-4"),
    "GRU, 1 layer": ("6.26e-1", "6.20e-1", "3.16e-1", "2.61e-1"),
    "GRU": ("6.55e-1", "6.49e-1", "3.27e-1", "1.94e-1"),
}
# The curve is the mean loss over each of this many equal parts of the training.
PARTS = 5


def rules_of(layer: str) -> list[str]:
    """The rules of Table 1 for a layer; `SnAp-1` equals `ours` where channels do not mix."""
    return [rule for rule in RULES if rule != ("SnAp-1" if layer == "LRU" else "ours")]


class OnlineCopy(Experiment):
    paper = {
        f"{layer}: {rule}": number
        for layer, numbers in PRINTED.items()
        for rule, number in zip(rules_of(layer), numbers, strict=True)
    }
    lines = {f"{layer}: {rule}": {"layer": layer, "rule": RULES[rule]} for layer in LAYERS for rule in rules_of(layer)}
    shared = {"num_tokens": 20, "num_examples": 20_000, "batch_size": 20, "learning_rate": 4e-3}
    sizes = {
        "small": {"steps": 600, "dropout": 0.0},
        # 25 epochs, of which 5 are warm-up.
        "paper": {"steps": 25_000, "dropout": 0.1, "warmup_share": 0.2, "arguments": WITHOUT_CLIPPING},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        fields, readout = LAYERS[settings["layer"]]
        data = CopiedBits(settings["num_tokens"], settings["num_examples"], settings["seed"])
        set_seed(settings["seed"])
        fields = {**fields, "dropout": settings["dropout"], "learning_rate_factor": 1.0}
        losses: list[torch.Tensor] = []
        results = train_bit_copier(BitCopier(fields, settings["rule"], readout), data, settings, losses)
        return {**results, "value": means_of_parts(losses, PARTS)}


def means_of_parts(losses: Sequence[torch.Tensor], parts: int) -> dict[str, float]:
    """Last step of each of `parts` equal parts → mean over the part."""
    values = torch.stack(list(losses)).float()
    parts = min(parts, len(values))
    return {
        str((len(values) * (n + 1)) // parts): part.mean().item() for n, part in enumerate(values.tensor_split(parts))
    }
