"""Weights of the dynamics and of the uniformity loss (SMT, section 3.6 and figure 14)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_recurrent import Corpus, SmtTeacherModel, uniformity_loss
from papers.engine.experiment import Settings
from papers.engine.pictures import mean_points
from papers.smt.models import SMT_DMT
from papers.smt.scaling import Scaling
from papers.smt.text import train_on_text
from papers.smt.training import method_values

DYNAMICS = {"small": (0.01, 0.1, 1.0), "paper": (0.0, 0.01, 0.1, 1.0, 10.0)}
UNIFORMITY = {"small": (0.0, 0.1), "paper": (0.0, 0.0001, 0.001, 0.01, 0.1)}
_MEMORIES = 64


class LossWeights(Scaling):
    def rows(self, size: str) -> list[Settings]:
        shared = super().rows(size)[0]
        shared = {key: value for key, value in shared.items() if key not in ("axis", "swept")}
        shared["context_length"] = self.sizes[size]["context_length"]
        return [
            {
                **shared,
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

    def draw(self, axes: Any, rows: Sequence[Settings]) -> bool:
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
        return True


@torch.no_grad()
def memory_uniformity(teacher: SmtTeacherModel, text: Corpus, context_length: int) -> float:
    """Uniformity loss of the teacher's memories of excerpts of a text."""
    teacher.eval()
    everything = np.concatenate(list(text))
    starts = np.linspace(0, len(everything) - context_length, _MEMORIES).astype(int)
    windows = np.stack([everything[start : start + context_length] for start in starts])
    ids = torch.from_numpy(windows.astype(np.int64)).to(teacher.device)
    return float(uniformity_loss(teacher.encode(ids)[:, None]))
