"""Other updates of the RNN on text: Transformer, MLP and GRU (SMT, section 3.3 and figure 5)."""

from collections.abc import Iterator
from typing import Any

from papers.engine.experiment import Settings
from papers.smt.models import BPTT, SMT_DMT
from papers.smt.text import EQUAL_OPERATIONS, TextMethods

BACKBONES = {"Transformer": "transformer", "MLP": "mlp", "GRU": "gru"}


class Backbones(TextMethods):
    def rows(self, size: str) -> list[Settings]:
        methods = {f"{BPTT}, {EQUAL_OPERATIONS}", SMT_DMT}
        return [
            {**row, "label": f"{name}: {row['label']}", "sizes": row["sizes"] | {"backbone": backbone}}
            for name, backbone in BACKBONES.items()
            for row in super(Backbones, self).rows(size)
            if row["label"] in methods
        ]

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        backbone = row["label"].partition(": ")[0]
        for label, place, value in super().points(row):
            yield label if label == row["label"] else f"{backbone}: {label}", place, value
