"""Digits drawn pixel by pixel: BPTT against SMT→DMT at equal optimizer steps; in black and white patches, the format
of Sketchy, also memories of an RNN that reads them (SMT, section 3.2)."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_recurrent import ExampleDraws, PixelSequences, Task
from papers.engine.experiment import Settings
from papers.engine.images import average_pooled, load_images
from papers.engine.pictures import as_colours, image_sheet, pack, principal_components, split_axes, unpack
from papers.smt.models import PAPER_MODEL, SMALL_MODEL, TEACHER, Pair, memories_of
from papers.smt.training import MethodComparison, learning_rates, train_on

_SAMPLES, _COLUMNS = 32, 8
_DATA = "images"
_SHOWN, _CANVAS = 3, 64
# Corners of a sleeping cat, straight lines between points of high curvature as in Attneave (1954); our own drawing.
_CAT = (
    (4, 40), (8, 28), (16, 20), (28, 17), (38, 19), (42, 12), (46, 18), (51, 18), (56, 12), (57, 22), (60, 29),
    (57, 36), (50, 39), (56, 44), (50, 48), (36, 46), (20, 50), (8, 48), (4, 40),
)  # fmt: skip


@dataclass(frozen=True)
class DigitPixels(Task):
    """Images of MNIST as sequences. Inputs are a start token and all pixels but the last, targets are all pixels.

    Ids 0 … `levels` - 1 are grey levels, `levels` is the start token. Examples are images drawn at random, examples of
    the split "train" from the training images.

    Args:
        data: directory of the published files.
        crop: pixels left out on each side; the digits fill 20 × 20 of the 28 × 28 pixels.
        pooling: side of the squares of pixels that are averaged.
        levels: number of grey levels, evenly spaced; 2 for black and white.
        patch: side of the squares of black and white pixels that are one token each (the paper's Sketchy: 2), read as
            a binary number row by row; with `levels` 2 only.
        is_tuning: the other splits are of a part of the training images, too.

    Raises:
        FileNotFoundError: files are missing; the message names the setting.
        ValueError: a file is damaged, the squares do not fit, or patches have more than two levels.
    """

    data: str
    crop: int = 0
    pooling: int = 1
    levels: int = 256
    patch: int = 1
    is_tuning: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.patch > 1 and self.levels != 2:
            raise ValueError(f"`patch` is {self.patch} and `levels` {self.levels}; patches need 2 levels.")

    @cached_property
    def _images(self) -> tuple[np.ndarray, np.ndarray, str]:
        train, test, words = load_images("mnist", self.data, self.is_tuning)
        pixels = []
        for images in (train, test):
            side = math.isqrt(images.images.shape[1])
            inside = slice(self.crop, side - self.crop)
            cropped = images.images.reshape(-1, side, side)[:, inside, inside].reshape(len(images), -1, 1)
            pooled = average_pooled(PixelSequences(cropped, images.labels), self.pooling).images[..., 0]
            pixels.append(to_patches(pooled.astype(np.int64) * self.levels // 256, self.patch))
        return *pixels, words

    @property
    def words(self) -> str:
        """Description of the images for the report."""
        return self._images[2]

    @property
    def vocab_size(self) -> int:
        return self.start_token + 1

    @property
    def start_token(self) -> int:
        """Id of the start token, after the ids of pixels or patches."""
        return self.levels**self.patch**2

    @property
    def length(self) -> int:
        return self._images[0].shape[1]

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        images = self._images[0 if draws.split == "train" else 1]
        targets = images[draws.integers("image", 1, len(images))[:, 0]]
        return np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=self.start_token), targets


def to_patches(images: np.ndarray, patch: int) -> np.ndarray:
    """Square images (count, pixels) of 0 and 1 as sequences of patches, each a binary number, (count, patches)."""
    count, side = len(images), math.isqrt(images.shape[1])
    if side % patch:
        raise ValueError(f"`patch` is {patch}; it must divide the images' side, which is {side}.")
    squares = images.reshape(count, side // patch, patch, side // patch, patch).transpose(0, 1, 3, 2, 4)
    digits = squares.reshape(count, -1, patch * patch)
    return digits @ (1 << np.arange(patch * patch)[::-1])


def from_patches(tokens: np.ndarray, patch: int) -> np.ndarray:
    """Undo [`to_patches`]."""
    if patch == 1:
        return tokens
    count, side = len(tokens), math.isqrt(tokens.shape[1])
    digits = tokens[..., None] >> np.arange(patch * patch)[::-1] & 1
    squares = digits.reshape(count, side, side, patch, patch).transpose(0, 1, 3, 2, 4)
    return squares.reshape(count, -1)


class PixelMethods(MethodComparison):
    sizes = {
        "small": {
            # Heads that tell pixels side by side from pixels one above the other (docs/log.md).
            "sizes": SMALL_MODEL | {"num_attention_heads": 2, "rope_theta": 100.0},
            "data": "data/mnist", "crop": 7, "pooling": 1, "levels": 2,
            "steps": 300, "dmt_steps": 120, "batch_size": 16,
            "learning_rate": 5e-3, "dmt_learning_rate": 1e-3,
            "context_length": 64, "future_length": 8,
            "timesteps": 8, "dmt_timesteps": 16, "eval_windows": 32, "num_tested": 200,
        },
        "paper": {
            "sizes": PAPER_MODEL,
            "data": "data/mnist", "crop": 0, "pooling": 1, "levels": 256,
            "steps": 151_500, "dmt_steps": 1500, "batch_size": 128, "dmt_batch_size": 32,
            "learning_rate": 3e-4, "dmt_learning_rate": 3e-5,
            "context_length": 256, "future_length": 64,
            "timesteps": 1, "dmt_timesteps": 16, "eval_windows": 256, "num_tested": 10_000,
        },
    }  # fmt: skip
    tuning = {"small": {"steps": 100, "dmt_steps": 40}, "paper": {"steps": 50_500, "dmt_steps": 500}}

    def rows(self, size: str) -> list[Settings]:
        return [row | {"candidates": learning_rates(row["method"], size, row)} for row in super().rows(size)]

    def run(self, settings: Settings) -> dict[str, Any]:
        results, (rnn, _), task = train_on_pixels(settings)
        return pixel_results(settings, results, rnn, task)

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        rows = [row for row in rows if row["seed"] == rows[0]["seed"]]
        sheets = {_DATA: rows[0]["images"]} | {row["label"]: row["samples"] for row in rows}
        panels = split_axes(axes, 1, 1 + len(sheets), (4 * (1 + len(sheets)), 3))
        super().draw(panels[0], rows)
        for panel, (title, images) in zip(panels[1:], sheets.items(), strict=True):
            _show_sheet(panel, images, title)


def train_on_pixels(settings: Settings) -> tuple[dict[str, Any], Pair, DigitPixels]:
    """Train an RNN on a row's digits by its `method`: results, (RNN, teacher), task."""
    names = ("data", "crop", "pooling", "levels", "patch", "seed", "is_tuning")
    options = {key: settings[key] for key in names if key in settings}
    task = DigitPixels(**options, num_validation_examples=settings["num_tested"])
    lengths = {key: min(settings[key], task.length) for key in ("context_length", "future_length")}
    return *train_on(task, settings, lengths), task


def pixel_results(settings: Settings, results: dict[str, Any], rnn: Any, task: DigitPixels) -> dict[str, Any]:
    """Results with bits per pixel as `value`, samples of the RNN and images that it has not seen."""
    measured = results["measured"]
    value = {settings["method"]: measured["loss"] / math.log(2) / task.patch**2}
    if "teacher_bits_per_byte" in measured:
        value[TEACHER] = measured["teacher_bits_per_byte"] / task.patch**2
    _, real = task.examples(np.arange(_SAMPLES), "validation")
    samples = draw_samples(rnn, task, _SAMPLES, settings["seed"])
    images = {"samples": pack(from_patches(samples, task.patch)), "images": pack(from_patches(real, task.patch))}
    return {**results, "value": value, "data_used": task.words, **images}


@torch.no_grad()
def draw_samples(rnn: Any, task: DigitPixels, count: int, seed: int) -> np.ndarray:
    """Sample images pixel by pixel, (count, T)."""
    rnn.eval()
    begin = torch.full((count, 1), task.start_token, device=rnn.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokens = rnn.generate(
            begin,
            attention_mask=torch.ones_like(begin),
            max_new_tokens=task.length,
            do_sample=True,
            top_k=0,
            suppress_tokens=[task.start_token],
            eos_token_id=None,
        )
    return tokens[:, 1:].cpu().numpy()


class SketchPixels(PixelMethods):
    sizes = {
        "small": PixelMethods.sizes["small"]
        | {
            "sizes": SMALL_MODEL,
            "crop": 0,
            "patch": 2,
            "future_length": 16,
            "steps": 160,
            "dmt_steps": 60,
        },
        # The images of Sketchy are 1,024 patches long (section E.2), the images of MNIST 196.
        "paper": PixelMethods.sizes["paper"] | {"levels": 2, "patch": 2},
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
        for title, images in ((_DATA, row["images"]), (row["label"], row["samples"])):
            _show_sheet(next(panels), images, title)
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


def _show_sheet(panel: Any, packed: Settings, title: str) -> None:
    """Draw packed images (count, pixels) side by side."""
    images = unpack(packed)
    side = math.isqrt(images.shape[1])
    _show(panel, image_sheet(images.reshape(-1, side, side), _COLUMNS), title)


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
    components = [principal_components(memory, 3) for memory in memories]
    second_map = "memory, t-SNE"
    try:
        from sklearn.manifold import TSNE

        options = {"perplexity": min(30, (task.length - 1) / 3), "init": "pca", "random_state": 0}
        neighbours = [TSNE(2, **options).fit_transform(memory.astype(np.float64)) for memory in memories]
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
    memories = memories_of(rnn, torch.from_numpy(tokens).to(rnn.device))
    return np.stack([memory.flatten(1).float().cpu().numpy() for memory in memories], 1)


def line_drawing(side: int) -> np.ndarray:
    """The cat in side × side pixels of 0 and 1, (1, pixels)."""
    corners = np.array(_CAT) * side / _CANVAS
    image = np.zeros((side, side), dtype=np.int64)
    for begin, end in itertools.pairwise(corners):
        steps = np.linspace(begin, end, 2 * side)
        column, row = np.clip(steps.astype(int), 0, side - 1).T
        image[row, column] = 1
    return image.reshape(1, -1)
