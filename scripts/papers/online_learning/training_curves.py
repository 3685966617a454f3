"""Losses of online learning by depth, eigenvalues and rule (Online learning of long-range dependencies, Figure 2)."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import set_seed

from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import split_axes
from papers.online_learning.bit_copier import (
    WITHOUT_CLIPPING,
    BitCopier,
    CopiedBits,
    train_bit_copier,
)
from papers.online_learning.copying import PARTS, means_of_parts

DEPTH, EIGENVALUES, RULE = "depth", "eigenvalues", "rule"
# Panel → label of a line → what it varies. `r_min` is |λ|min at initialisation.
PANELS: dict[str, dict[str, Settings]] = {
    DEPTH: {f"ours, {n} layer{'s' * (n > 1)}": {"layers": n} for n in (1, 2, 3, 4)},
    EIGENVALUES: {f"ours, |λ| from {r_min}": {"r_min": r_min} for r_min in (0.0, 0.5, 0.75, 0.9)},
    RULE: {"ours": {}, "truncated": {"rule": "truncated"}, "spatial": {"rule": "spatial"}, "BPTT": {"rule": "bptt"}},
}
_DEFAULTS: Settings = {"rule": "rtrl", "layers": 4, "r_min": 0.0}
# Table 4: the rates of panel F are compared for each rule.
PAPER_RATES = {DEPTH: 1e-3, EIGENVALUES: 2e-3}
RULE_RATES = {"small": (2e-3, 4e-3, 8e-3), "paper": (1e-3, 2e-3, 4e-3, 8e-3)}


class TrainingCurves(Experiment):
    shared = {"num_tokens": 20, "num_examples": 20_000}
    sizes = {
        "small": {"steps": 200, "batch_size": 20, "dropout": 0.0},
        "paper": {"steps": 10_000, "batch_size": 50, "dropout": 0.1, "arguments": WITHOUT_CLIPPING},
    }
    tuning = {"small": {"steps": 100}}

    def rows(self, size: str) -> list[Settings]:
        rates = {panel: {"learning_rate": 4e-3 if size == "small" else rate} for panel, rate in PAPER_RATES.items()}
        rates[RULE] = {"candidates": [{"learning_rate": rate} for rate in RULE_RATES[size]]}
        return [
            {
                "label": f"{panel}: {label}",
                "panel": panel,
                **self.size_settings(size),
                **_DEFAULTS,
                **own,
                **rates[panel],
            }
            for panel, lines in PANELS.items()
            for label, own in lines.items()
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        data = CopiedBits(settings["num_tokens"], settings["num_examples"], settings["seed"])
        set_seed(settings["seed"])
        fields = {"num_hidden_layers": settings["layers"], "r_min": settings["r_min"], "dropout": settings["dropout"]}
        losses: list[torch.Tensor] = []
        results = train_bit_copier(BitCopier(fields, settings["rule"]), data, settings, losses)
        return {**results, "value": means_of_parts(losses, PARTS)}

    def tuning_loss(self, row: Settings) -> float:
        return list(row["value"].values())[-1]

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        panels = list(dict.fromkeys(row["panel"] for row in rows))
        for panel, name in zip(split_axes(axes, 1, len(panels), (5 * len(panels), 4)), panels, strict=True):
            super().draw(panel, [row for row in rows if row["panel"] == name])
            panel.set(title=name)
