"""Memory size against training: how small a memory reaches a loss (SMT, section 3.5)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from papers.engine.experiment import Settings
from papers.engine.pictures import mean_points
from papers.smt.models import SMT_DMT, TEACHER
from papers.smt.scaling import Scaling, with_value

TOKENS = {"small": (1, 2, 4), "paper": (1, 2, 4, 8, 16, 32)}
STEPS = {"small": (100, 200, 400), "paper": (9_375, 18_750, 37_500, 75_000, 150_000)}


class Compression(Scaling):
    def rows(self, size: str) -> list[Settings]:
        shared = {key: value for key, value in super().rows(size)[0].items() if key not in ("axis", "swept")}
        shared |= {"dmt_steps": 0, "context_length": self.sizes[size]["context_length"]}
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

    def draw(self, axes: Any, rows: Sequence[Settings]) -> bool:
        """Contours of equal loss over steps and size of the memory."""
        steps = sorted({row["steps"] for row in rows})
        tokens = sorted({row["sizes"]["num_memory_tokens"] for row in rows})
        if min(len(steps), len(tokens)) < 2:
            return False
        cells = dict(mean_points(((row["sizes"]["num_memory_tokens"], row["steps"]), row["value"]) for row in rows))
        loss = [[cells.get((count, step), np.nan) for step in steps] for count in tokens]
        lines = axes.contour(steps, tokens, loss, levels=8, cmap="viridis")
        axes.clabel(lines, fontsize="small")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(xlabel="optimizer steps", ylabel="memory tokens", title=self.metric)
        return True
