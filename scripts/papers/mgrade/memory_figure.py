"""Figure 4B of mGRADE, accuracy against memory, and the grids of figures S2 to S4."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from papers.engine.experiment import Settings
from papers.engine.pictures import split_axes

# Colour and line style of each architecture.
_STYLES = {
    "TCN-CD": ("tab:orange", "--"),
    "mGRADE-CD": ("tab:blue", "--"),
    "TCN-EID": ("tab:orange", "-"),
    "mGRADE-EID": ("tab:blue", "-"),
    "mGRADE-L, frozen weights": ("tab:green", ":"),
    "mGRADE-L": ("tab:green", "-"),
    "mGRADE-L, random positions": ("tab:green", "--"),
}
Place = tuple[int, int]  # K, and dilation or longest delay


def draw_figure(axes: Any, rows: Sequence[Settings], delay_names: Mapping[str, str]) -> None:
    """Replace the axes by one with a line for each architecture and one with a grid for each.

    Args:
        rows: finished rows with `architecture`, `options`, `value`, `num_parameters` and `total_memory`.
        delay_names: architecture → name of its grid's second axis.
    """
    lines, *panels = split_axes(axes, 2, 4, (19, 9))
    for panel, name in zip(panels, delay_names, strict=True):
        cells = by_place([row for row in rows if row["architecture"] == name])
        if cells:
            _draw_line(lines, name, cells.values())
            _draw_grid(panel, name, delay_names[name], cells)
        else:
            panel.axis("off")
    lines.set(xlabel="floats at inference", ylabel="accuracy (%)")
    lines.legend(fontsize="small")


def by_place(rows: Iterable[Settings]) -> dict[Place, Settings]:
    """One row for each place of a grid, with the mean of all seeds as its `value`, in per cent."""
    seeds: dict[Place, list[Settings]] = {}
    for row in rows:
        options = row["options"]
        delay = options["receptive_field"] if "receptive_field" in options else options["dilation"]
        seeds.setdefault((options["conv_kernel"], delay), []).append(row)
    return {
        place: same[0] | {"value": 100 * statistics.fmean(row["value"] for row in same)}
        for place, same in seeds.items()
    }


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (memory, accuracy) that are better than all with less or equal memory, by memory."""
    best: list[tuple[float, float]] = []
    for memory, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or accuracy > best[-1][1]:
            best.append((memory, accuracy))
    return best


def _draw_line(panel: Any, name: str, cells: Iterable[Settings]) -> None:
    points = [(cell["total_memory"], cell["value"]) for cell in cells]
    colour, style = _STYLES[name]
    panel.plot(*zip(*points, strict=True), "o", color=colour, markersize=4, alpha=0.5)
    panel.plot(*zip(*frontier(points), strict=True), color=colour, linestyle=style, marker="o", label=name)


def _draw_grid(panel: Any, name: str, delay_name: str, cells: Mapping[Place, Settings]) -> None:
    """Accuracy, parameters and total memory at each place, as the paper prints them."""
    taps, delays = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    values = np.full((len(taps), len(delays)), np.nan)
    for (own_taps, delay), cell in cells.items():
        row, column = taps.index(own_taps), delays.index(delay)
        values[row, column] = cell["value"]
        text = f"{cell['value']:.1f}\np={cell['num_parameters']:,}\ntmf={cell['total_memory']:,}"
        panel.text(column, row, text, ha="center", va="center", fontsize="small")
    panel.imshow(values, cmap="Greens", aspect="auto", alpha=0.6)
    panel.set_xticks(range(len(delays)), delays)
    panel.set_yticks(range(len(taps)), taps)
    panel.set(xlabel=delay_name, ylabel="K", title=name)
    panel.set_axisbelow(True)
