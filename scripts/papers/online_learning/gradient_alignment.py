"""Cosines between online and true gradients (Online learning of long-range dependencies, Figure 2)."""

from collections.abc import Iterator
from typing import Any

from transformers import set_seed

from papers.engine.experiment import Experiment, Settings
from papers.online_learning.bit_copier import (
    WITHOUT_CLIPPING,
    BitCopier,
    CopiedBits,
    layer_cosines,
    train_bit_copier,
)

AT_FIRST, TRAINED = "at first", "trained"


class GradientAlignmentFigure(Experiment):
    # Panels A, C and E; `r_min` is |λ|min at initialisation.
    lines = {
        "ours, 1 layer": {"rule": "rtrl", "layers": 1, "r_min": 0.0},
        "ours, 2 layers": {"rule": "rtrl", "layers": 2, "r_min": 0.0},
        "ours, 3 layers": {"rule": "rtrl", "layers": 3, "r_min": 0.0},
        "ours, 4 layers": {"rule": "rtrl", "layers": 4, "r_min": 0.0},
        "ours, 4 layers, |λ| from 0.9": {"rule": "rtrl", "layers": 4, "r_min": 0.9},
        "truncated, 4 layers": {"rule": "truncated", "layers": 4, "r_min": 0.0},
        "spatial, 4 layers": {"rule": "spatial", "layers": 4, "r_min": 0.0},
    }
    shared = {"num_tokens": 20, "num_examples": 20_000}
    sizes = {
        "small": {"steps": 300, "batch_size": 20, "learning_rate": 4e-3, "num_measured": 100},
        "paper": {
            "steps": 10_000, "batch_size": 50, "learning_rate": 1e-3, "num_measured": 1000, "dropout": 0.1,
            "arguments": WITHOUT_CLIPPING,
        },
    }  # fmt: skip

    def run(self, settings: Settings) -> dict[str, Any]:
        data = CopiedBits(settings["num_tokens"], settings["num_examples"], settings["seed"])
        measured = CopiedBits(settings["num_tokens"], settings["num_measured"], settings["seed"], "validation")
        if settings.get("begins_with_a_bit"):
            measured.drop_silent_starts()
        set_seed(settings["seed"])
        fields = {"num_hidden_layers": settings["layers"], "dropout": settings.get("dropout", 0.0)}
        model = BitCopier({**fields, "r_min": settings["r_min"]}, settings["rule"])
        cosines = {AT_FIRST: layer_cosines(model, measured)}
        results = train_bit_copier(model, data, settings)
        cosines[TRAINED] = layer_cosines(model, measured)
        value = {f"{stage}: {n}": cosine for stage, layers in cosines.items() for n, cosine in enumerate(layers, 1)}
        return {**results, "value": value}

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        for place, value in row["value"].items():
            stage, _, layer = place.partition(": ")
            yield f"{row['label']}, {stage}", layer, value
