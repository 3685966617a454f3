"""Longer contexts, larger memories and larger models on text (SMT, section 3.4)."""

from collections.abc import Sequence
from typing import Any

from papers.engine.experiment import Settings
from papers.engine.pictures import mean_points, split_axes
from papers.smt.models import PAPER_MODEL, SMALL_MODEL, SMT_DMT, TEACHER
from papers.smt.text import TextMethods

# Axis → size → values. The paper prints its ranges only in figures.
AXES: dict[str, dict[str, tuple[int, ...]]] = {
    "context Tc": {"small": (4, 32), "paper": (16, 32, 64, 128, 256, 512)},
    "memory tokens": {"small": (1, 8), "paper": (1, 2, 4, 8, 16, 32)},
    "width": {"small": (16, 64), "paper": (64, 128, 256, 512)},
    "layers": {"small": (1, 4), "paper": (2, 4, 8, 16)},
}
_MODELS = {"small": SMALL_MODEL | {"num_readout_layers": 2}, "paper": PAPER_MODEL}


class Scaling(TextMethods):
    tuning = {}

    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size) | {"method": SMT_DMT, "sizes": _MODELS[size]}
        shared |= {"steps": 400, "dmt_steps": 60} if size == "small" else {}
        rate = 3e-3 if size == "small" else 3e-4
        shared |= {"learning_rate": rate, "dmt_learning_rate": rate / 3 if size == "small" else 3e-5}
        return [
            {"label": f"{axis} {value}", "axis": axis, "swept": value, **with_value(shared, axis, value)}
            for axis, values in AXES.items()
            for value in values[size]
        ]

    def points(self, row: Settings) -> Any:
        for kind in (SMT_DMT, TEACHER):
            yield f"{row['label']}, {kind}", None, row["value"][kind]

    def draw(self, axes: Any, rows: Sequence[Settings]) -> bool:
        swept = list(dict.fromkeys(row["axis"] for row in rows))
        for panel, axis in zip(split_axes(axes, 1, len(swept), (4 * len(swept), 4)), swept, strict=True):
            for kind in (SMT_DMT, TEACHER):
                places = mean_points((row["swept"], row["value"][kind]) for row in rows if row["axis"] == axis)
                panel.plot(*zip(*places, strict=True), "o-", label=kind)
            panel.set_xscale("log", base=2)
            panel.set(xlabel=axis, ylabel=self.metric)
            panel.legend(fontsize="small")
        return True


def with_value(settings: Settings, axis: str, value: int) -> Settings:
    """Settings with the value of one axis."""
    if axis == "context Tc":
        return settings | {"context_length": value}
    fields = {"memory tokens": "num_memory_tokens", "width": "hidden_size", "layers": "num_hidden_layers"}
    return settings | {"sizes": settings["sizes"] | {fields[axis]: value}}
