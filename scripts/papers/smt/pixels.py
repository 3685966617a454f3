"""Digits drawn pixel by pixel: BPTT against SMT→DMT at equal optimizer steps (SMT, section 3.2)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_recurrent import ExampleDraws, PixelSequences, Task
from papers.engine.experiment import Settings
from papers.engine.images import average_pooled, load_images
from papers.engine.pictures import image_sheet, pack, split_axes, unpack
from papers.engine.tuning import is_tuning
from papers.smt.models import PAPER_MODEL, SMALL_MODEL, TEACHER, Pair
from papers.smt.training import MethodComparison, learning_rates, train_on

_SAMPLES, _COLUMNS = 32, 8
_DATA = "images"


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
    if patch == 1:
        return images
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
        sheets = {_DATA: unpack(rows[0]["images"])} | {row["label"]: unpack(row["samples"]) for row in rows}
        panels = split_axes(axes, 1, 1 + len(sheets), (4 * (1 + len(sheets)), 3))
        super().draw(panels[0], rows)
        for panel, (title, images) in zip(panels[1:], sheets.items(), strict=True):
            side = math.isqrt(images.shape[1])
            panel.imshow(image_sheet(images.reshape(-1, side, side), _COLUMNS), cmap="gray")
            panel.set_title(title)
            panel.axis("off")


def train_on_pixels(settings: Settings) -> tuple[dict[str, Any], Pair, DigitPixels]:
    """Train an RNN on a row's digits by its `method`: results, (RNN, teacher), task."""
    options = {key: settings[key] for key in ("data", "crop", "pooling", "levels", "patch", "seed") if key in settings}
    task = DigitPixels(**options, num_validation_examples=settings["num_tested"], is_tuning=is_tuning(settings))
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
