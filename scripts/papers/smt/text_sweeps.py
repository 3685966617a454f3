"""Sweeps of SMT→DMT on text: contexts, memories, models, updates, training and weights of the losses (SMT, sections
3.3 to 3.6)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hf_recurrent import Corpus, SmtTeacherModel, uniformity_loss
from papers.engine.experiment import Settings
from papers.engine.pictures import mean_points, split_axes
from papers.smt.models import BPTT, PAPER_MODEL, SMALL_MODEL, SMT_DMT, TEACHER
from papers.smt.text import EQUAL_OPERATIONS, TextMethods, train_on_text
from papers.smt.training import method_values

# Axis → size → values. The paper prints its ranges only in figures.
AXES: dict[str, dict[str, tuple[int, ...]]] = {
    "context Tc": {"small": (4, 32), "paper": (16, 32, 64, 128, 256, 512)},
    "memory tokens": {"small": (1, 8), "paper": (1, 2, 4, 8, 16, 32)},
    "width": {"small": (16, 64), "paper": (64, 128, 256, 512)},
    "layers": {"small": (1, 4), "paper": (2, 4, 8, 16)},
}
_TRAINING: dict[str, Settings] = {
    "small": {
        "sizes": SMALL_MODEL | {"num_readout_layers": 2}, "steps": 400, "dmt_steps": 60,
        "learning_rate": 3e-3, "dmt_learning_rate": 1e-3,
    },
    "paper": {"sizes": PAPER_MODEL, "learning_rate": 3e-4, "dmt_learning_rate": 3e-5},
}  # fmt: skip
BACKBONES = {"Transformer": "transformer", "MLP": "mlp", "GRU": "gru"}
TOKENS = {"small": (1, 2, 4), "paper": (1, 2, 4, 8, 16, 32)}
STEPS = {"small": (100, 200, 400), "paper": (9_375, 18_750, 37_500, 75_000, 150_000)}
DYNAMICS = {"small": (0.01, 0.1, 1.0), "paper": (0.0, 0.01, 0.1, 1.0, 10.0)}
UNIFORMITY = {"small": (0.0, 0.1), "paper": (0.0, 0.0001, 0.001, 0.01, 0.1)}
_MEMORIES = 64


class Scaling(TextMethods):
    tuning = {}

    def size_settings(self, size: str) -> Settings:
        return super().size_settings(size) | {"method": SMT_DMT} | _TRAINING[size]

    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size)
        return [
            {"label": f"{axis} {value}", "axis": axis, "swept": value, **with_value(shared, axis, value)}
            for axis, values in AXES.items()
            for value in values[size]
        ]

    def points(self, row: Settings) -> Any:
        for kind in (SMT_DMT, TEACHER):
            yield f"{row['label']}, {kind}", None, row["value"][kind]

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        swept = list(dict.fromkeys(row["axis"] for row in rows))
        for panel, axis in zip(split_axes(axes, 1, len(swept), (4 * len(swept), 4)), swept, strict=True):
            for kind in (SMT_DMT, TEACHER):
                places = mean_points((row["swept"], row["value"][kind]) for row in rows if row["axis"] == axis)
                panel.plot(*zip(*places, strict=True), "o-", label=kind)
            panel.set_xscale("log", base=2)
            panel.set(xlabel=axis, ylabel=self.metric)
            panel.legend(fontsize="small")


def with_value(settings: Settings, axis: str, value: int) -> Settings:
    """Settings with the value of one axis."""
    if axis == "context Tc":
        return settings | {"context_length": value}
    fields = {"memory tokens": "num_memory_tokens", "width": "hidden_size", "layers": "num_hidden_layers"}
    return settings | {"sizes": settings["sizes"] | {fields[axis]: value}}


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


class Compression(Scaling):
    def rows(self, size: str) -> list[Settings]:
        shared = self.size_settings(size) | {"dmt_steps": 0}
        return [
            with_value(shared, "memory tokens", tokens) | {"label": f"{tokens} memory tokens", "steps": steps}
            for tokens in TOKENS[size]
            for steps in STEPS[size]
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results = super().run(settings)
        return {**results, "value": results["value"][TEACHER], "value_of_rnn": results["value"][SMT_DMT]}

    def points(self, row: Settings) -> Any:
        yield row["label"], row["steps"], row["value"]

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """Contours of equal loss over steps and size of the memory."""
        steps = sorted({row["steps"] for row in rows})
        tokens = sorted({row["sizes"]["num_memory_tokens"] for row in rows})
        if min(len(steps), len(tokens)) < 2:
            TextMethods.draw(self, axes, rows)
            return
        cells = dict(mean_points(((row["sizes"]["num_memory_tokens"], row["steps"]), row["value"]) for row in rows))
        loss = [[cells.get((count, step), np.nan) for step in steps] for count in tokens]
        lines = axes.contour(steps, tokens, loss, levels=8, cmap="viridis")
        axes.clabel(lines, fontsize="small")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(xlabel="optimizer steps", ylabel="memory tokens", title=self.metric)


class LossWeights(Scaling):
    def rows(self, size: str) -> list[Settings]:
        return [
            {
                **self.size_settings(size),
                "label": f"λ_dyn {dynamics:g}",
                "uniformity": uniformity,
                "smt": {"dynamics_weight": dynamics, "uniformity_weight": uniformity},
            }
            for dynamics in DYNAMICS[size]
            for uniformity in UNIFORMITY[size]
        ]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, (_, teacher), held_out = train_on_text(settings)
        uniformity = memory_uniformity(teacher, held_out, settings["context_length"])
        value = method_values(results, "bits_per_byte")[SMT_DMT]
        return {**results, "value": value, "uniformity_loss": uniformity}

    def points(self, row: Settings) -> Any:
        yield row["label"], row["uniformity"], row["value"]

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """A cell for each pair of weights: bits per byte, and below them the uniformity loss."""
        columns = sorted({row["uniformity"] for row in rows})
        lines = sorted({row["smt"]["dynamics_weight"] for row in rows})
        grid = np.full((2, len(lines), len(columns)), np.nan)
        for number, measure in enumerate(("value", "uniformity_loss")):
            cells = (((row["smt"]["dynamics_weight"], row["uniformity"]), row[measure]) for row in rows)
            for (dynamics, uniformity), mean in mean_points(cells):
                grid[number, lines.index(dynamics), columns.index(uniformity)] = mean
        axes.imshow(grid[0], cmap="Blues", alpha=0.6)
        for (line, column), bits in np.ndenumerate(grid[0]):
            text = f"{bits:.3f}\n{grid[1, line, column]:.2f}"
            axes.text(column, line, text, ha="center", va="center")
        axes.set_xticks(range(len(columns)), [f"{weight:g}" for weight in columns])
        axes.set_yticks(range(len(lines)), [f"{weight:g}" for weight in lines])
        axes.set(xlabel="λ_unif", ylabel="λ_dyn", title=f"{self.metric}, and uniformity loss of the memories")


@torch.no_grad()
def memory_uniformity(teacher: SmtTeacherModel, text: Corpus, context_length: int) -> float:
    """Uniformity loss of the teacher's memories of excerpts of a text."""
    teacher.eval()
    everything = np.concatenate(list(text))
    starts = np.linspace(0, len(everything) - context_length, _MEMORIES).astype(int)
    windows = np.stack([everything[start : start + context_length] for start in starts])
    ids = torch.from_numpy(windows.astype(np.int64)).to(teacher.device)
    return float(uniformity_loss(teacher.encode(ids)[:, None]))
