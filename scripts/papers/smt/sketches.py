"""Black and white patches, the format of Sketchy, and memories of an RNN that reads them (SMT, section 3.2)."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from papers.engine.experiment import Settings
from papers.engine.pictures import image_sheet, pack, split_axes, unpack
from papers.engine.projections import as_colours, project
from papers.smt.models import PAPER_MODEL, SMALL_MODEL
from papers.smt.pixels import (
    DigitPixels,
    PixelMethods,
    from_patches,
    pixel_results,
    to_patches,
    train_on_pixels,
)

_SHOWN, _COLUMNS, _CANVAS = 3, 8, 64
# Corners of a sleeping cat, straight lines between points of high curvature as in Attneave (1954); our own drawing.
_CAT = (
    (4, 40), (8, 28), (16, 20), (28, 17), (38, 19), (42, 12), (46, 18), (51, 18), (56, 12), (57, 22), (60, 29),
    (57, 36), (50, 39), (56, 44), (50, 48), (36, 46), (20, 50), (8, 48), (4, 40),
)  # fmt: skip


class SketchPixels(PixelMethods):
    sizes = {
        "small": PixelMethods.sizes["small"]
        | {
            "sizes": SMALL_MODEL,
            "crop": 0,
            "patch": 2,
            "context_length": 64,
            "future_length": 16,
            "steps": 160,
            "dmt_steps": 60,
        },
        # The images of Sketchy are 1,024 patches long (section E.2), the images of MNIST 196.
        "paper": PixelMethods.sizes["paper"] | {"sizes": PAPER_MODEL, "levels": 2, "patch": 2},
    }

    def run(self, settings: Settings) -> dict[str, Any]:
        results, (rnn, _), task = train_on_pixels(settings)
        return {**pixel_results(settings, results, rnn, task), **memories_while_reading(rnn, task)}

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """A sheet of samples for each method, then for each image: pixels, memory as colours, its two paths."""
        rows = [row for row in rows if row["seed"] == rows[0]["seed"]]
        count = rows[0]["shown"]["shape"][0]
        panels = iter(split_axes(axes, len(rows) * (count + 1), 4, (12, 3 * len(rows) * (count + 1))))
        for row in rows:
            self._draw_row(row, panels)

    def _draw_row(self, row: Settings, panels: Iterator[Any]) -> None:
        for title, images in (("images", row["images"]), (row["label"], row["samples"])):
            pixels = unpack(images)
            side = math.isqrt(pixels.shape[1])
            _show(next(panels), image_sheet(pixels.reshape(-1, side, side), _COLUMNS), title)
        for _ in range(2):
            next(panels).axis("off")
        for image, components, neighbours in zip(
            *(unpack(row[key]) for key in ("shown", "components", "neighbours")), strict=True
        ):
            side, places = math.isqrt(len(image)), math.isqrt(len(components))
            _show(next(panels), image.reshape(side, side), "read")
            colours = as_colours(components.astype(np.float64))
            _show(next(panels), colours.reshape(places, places, 3), "memory, PCA as colours")
            for path, title in ((components[:, :2], "memory, PCA"), (neighbours, row["second_map"])):
                panel = next(panels)
                panel.plot(*path.T, color="lightgray", linewidth=0.7, zorder=0)
                panel.scatter(*path.T, c=np.arange(len(path)), cmap="viridis", s=6)
                panel.set_title(title)


def _show(panel: Any, image: np.ndarray, title: str) -> None:
    panel.imshow(image, cmap="gray")
    panel.set_title(title)
    panel.axis("off")


def memories_while_reading(rnn: Any, task: DigitPixels) -> dict[str, Any]:
    """Images of digits and the line drawing, and projections of the memory after each of their patches: principal
    components, and t-SNE, or without scikit-learn the second and third component again."""
    _, digits = task.examples(np.arange(_SHOWN), "validation")
    drawing = to_patches(line_drawing(math.isqrt(task.length) * task.patch), task.patch)
    shown = np.concatenate([digits, drawing])
    memories = read_images(rnn, shown)
    components = [project(memory, 3) for memory in memories]
    second_map = "memory, t-SNE"
    try:
        neighbours = [project(memory, 2, "tsne") for memory in memories]
    except ImportError:
        neighbours, second_map = [points[:, 1:] for points in components], "memory, components 2 and 3"
    return {
        "shown": pack(from_patches(shown, task.patch)),
        "components": pack(np.stack(components)),
        "neighbours": pack(np.stack(neighbours)),
        "second_map": second_map,
    }


@torch.no_grad()
def read_images(rnn: Any, tokens: np.ndarray) -> np.ndarray:
    """Memories after each token of sequences (count, T), (count, T, Z·D)."""
    rnn.eval()
    ids = torch.from_numpy(tokens).to(rnn.device)
    memory = rnn.init_state(len(ids))["memory"]
    memories = []
    for step in range(ids.shape[1]):
        memory = rnn.update(memory, ids[:, step])
        memories.append(memory.flatten(1).float().cpu().numpy())
    return np.stack(memories, 1)


def line_drawing(side: int) -> np.ndarray:
    """The cat in side × side pixels of 0 and 1, (1, pixels)."""
    corners = np.array(_CAT) * side / _CANVAS
    image = np.zeros((side, side), dtype=np.int64)
    for begin, end in itertools.pairwise(corners):
        steps = np.linspace(begin, end, 2 * side)
        column, row = np.clip(steps.astype(int), 0, side - 1).T
        image[row, column] = 1
    return image.reshape(1, -1)
