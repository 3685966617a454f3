"""Principal components of the hidden states on the Lorenz attractor, in pairs (mGRADE, appendix A.2, figure S1)."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from papers.engine.experiment import Experiment, Settings
from papers.engine.pictures import pack, split_axes, unpack
from papers.engine.projections import project
from papers.mgrade.lorenz import (
    MODELS,
    SIZES,
    LorenzReconstruction,
    neighbour_overlap,
    states_and_targets,
    train_regressor,
    trajectories,
)

# The smallest and the largest step with three recorded seeds in the experiment on figure 2.
TIME_STEPS = (0.02, 0.1)
_COMPONENTS, _DRAWN = 3, 3
# Dimensions of the attractor, to be compared with the components.
_AXES = "xyz"


class LorenzComponents(Experiment):
    lines = {
        f"{label}, dt {dt}": {"options": SIZES | options, "dt": dt}
        for dt in TIME_STEPS
        for label, options in MODELS.items()
    }
    shared = LorenzReconstruction.shared
    sizes = LorenzReconstruction.sizes

    def run(self, settings: Settings) -> dict[str, Any]:
        model, _, test, results = train_regressor(settings)
        states = states_and_targets(model.eval(), test)[0].numpy()
        components = project(states.reshape(-1, states.shape[-1]), _COMPONENTS)
        drawn = components.reshape(*states.shape[:2], _COMPONENTS)[:_DRAWN]
        points = torch.from_numpy(test.clean[:, :-1]).flatten(0, 1)
        return {
            **results,
            "value": explained_variance(components, states),
            "neighbour_overlap": neighbour_overlap(points, torch.from_numpy(components)),
            "components": pack(drawn),
        }

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        overlap = statistics.fmean(100 * row["neighbour_overlap"] for row in rows)
        return {**super().details(rows), "neighbours kept, %": f"{overlap:.1f}"}

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """A row of panels for the attractor and one for each model, three columns for each time step."""
        rows = [row for row in rows if row["seed"] == rows[0]["seed"]]
        steps = list(dict.fromkeys(row["dt"] for row in rows))
        columns = [[row for row in rows if row["dt"] == step] for step in steps]
        height = 1 + max(map(len, columns))
        panels = split_axes(axes, height, 3 * len(steps), (5.5 * len(steps), 2.1 * height))
        for panel in panels:
            panel.axis("off")
        for place, same in enumerate(columns):
            own = [panels[number * 3 * len(steps) + 3 * place :][:3] for number in range(height)]
            attractor = trajectories(same[0], _DRAWN, "test").clean[:, :-1]
            _draw_pairs(own[0], attractor, list(_AXES), f"attractor, dt {same[0]['dt']}")
            for row, triple in zip(same, own[1:], strict=False):
                names = [f"PC{number} ({100 * share:.0f} %)" for number, share in row["value"].items()]
                _draw_pairs(triple, unpack(row["components"]).astype(np.float64), names, row["label"])


def explained_variance(components: np.ndarray, states: np.ndarray) -> dict[str, float]:
    """Number of a component → its share of the variance of states (…, M), from their projections (points, numbers)."""
    whole = states.reshape(-1, states.shape[-1]).var(0).sum()
    return {str(number): float(variance / whole) for number, variance in enumerate(components.var(0), start=1)}


def _draw_pairs(panels: Sequence[Any], tracks: np.ndarray, names: Sequence[str], title: str) -> None:
    """Draw tracks (trajectories, T, 3), one pair of their numbers in each panel."""
    for panel, (first, second) in zip(panels, itertools.combinations(range(3), 2), strict=True):
        panel.axis("on")
        for track in tracks:
            # Smooth lines would make the file four times as large.
            panel.plot(track[:, first], track[:, second], linewidth=0.5, antialiased=False)
        panel.set(xlabel=names[first], ylabel=names[second], xticks=[], yticks=[])
    panels[1].set_title(title, fontsize="medium")
