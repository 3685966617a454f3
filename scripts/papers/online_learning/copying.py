"""Online learning rules on the copy task: losses, training curves and the directions of gradients (Online learning of
long-range dependencies, section 4.2, Table 1 and Figure 2)."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import set_seed

from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import split_axes
from papers.online_learning.bit_copier import WITHOUT_CLIPPING, BitCopier, CopiedBits, layer_cosines, train_bit_copier

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
DEPTH, EIGENVALUES, RULE = "depth", "eigenvalues", "rule"
# Panel of Figure 2 → label of a line → what it varies. `r_min` is |λ|min at initialisation.
PANELS: dict[str, dict[str, Settings]] = {
    DEPTH: {f"ours, {n} layer{'s' * (n > 1)}": {"layers": n} for n in (1, 2, 3, 4)},
    EIGENVALUES: {f"ours, |λ| from {r_min}": {"r_min": r_min} for r_min in (0.0, 0.5, 0.75, 0.9)},
    RULE: {"ours": {}, "truncated": {"rule": "truncated"}, "spatial": {"rule": "spatial"}, "BPTT": {"rule": "bptt"}},
}
_DEFAULTS: Settings = {"rule": "rtrl", "layers": 4, "r_min": 0.0}
# Table 4: the rates of panel F are compared for each rule.
PAPER_RATES = {DEPTH: 1e-3, EIGENVALUES: 2e-3}
RULE_RATES = {"small": (2e-3, 4e-3, 8e-3), "paper": (1e-3, 2e-3, 4e-3, 8e-3)}
AT_FIRST, TRAINED = "at first", "trained"


def rules_of(layer: str) -> list[str]:
    """The rules of Table 1 for a layer; `SnAp-1` equals `ours` where channels do not mix."""
    return [rule for rule in RULES if rule != ("SnAp-1" if layer == "LRU" else "ours")]


class CopyingExperiment(Experiment):
    """Losses of models that learn to copy bits by a row's `rule`."""

    shared = {"num_tokens": 20, "num_examples": 20_000}

    def model_fields(self, settings: Settings) -> tuple[Settings, int]:
        """Fields of a row's model and the width of its readout."""
        names = {"num_hidden_layers": "layers", "r_min": "r_min", "dropout": "dropout"}
        return {field: settings.get(name, 0.0) for field, name in names.items()}, 0

    def model_and_data(self, settings: Settings) -> tuple[BitCopier, CopiedBits]:
        """A row's new model, and its examples."""
        data = CopiedBits(settings["num_tokens"], settings["num_examples"], settings["seed"])
        set_seed(settings["seed"])
        fields, readout = self.model_fields(settings)
        return BitCopier(fields, settings["rule"], readout), data

    def run(self, settings: Settings) -> dict[str, Any]:
        losses: list[torch.Tensor] = []
        results = train_bit_copier(*self.model_and_data(settings), settings, losses)
        return {**results, "value": means_of_parts(losses, PARTS)}


class OnlineCopy(CopyingExperiment):
    paper = {
        f"{layer}: {rule}": number
        for layer, numbers in PRINTED.items()
        for rule, number in zip(rules_of(layer), numbers, strict=True)
    }
    lines = {f"{layer}: {rule}": {"layer": layer, "rule": RULES[rule]} for layer in LAYERS for rule in rules_of(layer)}
    sizes = {
        "small": {"batch_size": 20, "learning_rate": 4e-3, "steps": 600, "dropout": 0.0},
        # 25 epochs, of which 5 are warm-up.
        "paper": {
            "batch_size": 20, "learning_rate": 4e-3, "steps": 25_000, "dropout": 0.1, "warmup_share": 0.2,
            "arguments": WITHOUT_CLIPPING,
        },
    }  # fmt: skip

    def model_fields(self, settings: Settings) -> tuple[Settings, int]:
        fields, readout = LAYERS[settings["layer"]]
        return {**fields, "dropout": settings["dropout"], "learning_rate_factor": 1.0}, readout


class TrainingCurves(CopyingExperiment):
    sizes = {
        "small": {"steps": 200, "batch_size": 20, "dropout": 0.0},
        "paper": {"steps": 10_000, "batch_size": 50, "dropout": 0.1, "arguments": WITHOUT_CLIPPING},
    }
    tuning = {"small": {"steps": 100}}

    def rows(self, size: str) -> list[Settings]:
        rates = {panel: {"learning_rate": 4e-3 if size == "small" else rate} for panel, rate in PAPER_RATES.items()}
        rates[RULE] = {"candidates": [{"learning_rate": rate} for rate in RULE_RATES[size]]}
        shared = {**self.size_settings(size), **_DEFAULTS}
        return [
            {"label": f"{panel}: {label}", "panel": panel, **shared, **own, **rates[panel]}
            for panel, lines in PANELS.items()
            for label, own in lines.items()
        ]

    def tuning_loss(self, row: Settings) -> float:
        return list(row["value"].values())[-1]

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        panels = list(dict.fromkeys(row["panel"] for row in rows))
        for panel, name in zip(split_axes(axes, 1, len(panels), (5 * len(panels), 4)), panels, strict=True):
            super().draw(panel, [row for row in rows if row["panel"] == name])
            panel.set(title=name)


class GradientAlignmentFigure(CopyingExperiment):
    # Panels A, C and E.
    lines = {
        "ours, 1 layer": _DEFAULTS | {"layers": 1},
        "ours, 2 layers": _DEFAULTS | {"layers": 2},
        "ours, 3 layers": _DEFAULTS | {"layers": 3},
        "ours, 4 layers": _DEFAULTS,
        "ours, 4 layers, |λ| from 0.9": _DEFAULTS | {"r_min": 0.9},
        "truncated, 4 layers": _DEFAULTS | {"rule": "truncated"},
        "spatial, 4 layers": _DEFAULTS | {"rule": "spatial"},
    }
    sizes = {
        "small": {"steps": 300, "batch_size": 20, "learning_rate": 4e-3, "num_measured": 100},
        "paper": {
            "steps": 10_000, "batch_size": 50, "learning_rate": 1e-3, "num_measured": 1000, "dropout": 0.1,
            "arguments": WITHOUT_CLIPPING,
        },
    }  # fmt: skip

    def run(self, settings: Settings) -> dict[str, Any]:
        measured = CopiedBits(settings["num_tokens"], settings["num_measured"], settings["seed"], "validation")
        if settings.get("begins_with_a_bit"):
            measured.drop_silent_starts()
        model, data = self.model_and_data(settings)
        cosines = {AT_FIRST: layer_cosines(model, measured)}
        results = train_bit_copier(model, data, settings)
        cosines[TRAINED] = layer_cosines(model, measured)
        value = {f"{stage}: {n}": cosine for stage, layers in cosines.items() for n, cosine in enumerate(layers, 1)}
        return {**results, "value": value}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for place, value in row["value"].items():
            stage, _, layer = place.partition(": ")
            yield f"{row['label']}, {stage}", layer, value


def means_of_parts(losses: Sequence[torch.Tensor], parts: int) -> dict[str, float]:
    """Last step of each of `parts` equal parts → mean over the part."""
    values = torch.stack(list(losses)).float()
    parts = min(parts, len(values))
    return {
        str((len(values) * (n + 1)) // parts): part.mean().item() for n, part in enumerate(values.tensor_split(parts))
    }
