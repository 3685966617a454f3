"""Digits drawn pixel by pixel: BPTT against SMT→DMT at equal optimizer steps (SMT, section 3.2)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_recurrent import PixelSequences, Task
from hf_recurrent.reproduce.engine.experiment import Settings
from hf_recurrent.reproduce.engine.images import average_pooled, load_images
from hf_recurrent.reproduce.engine.pictures import image_sheet, pack, split_axes, unpack
from hf_recurrent.reproduce.engine.report import draw_table
from hf_recurrent.reproduce.smt.models import BPTT, PAPER_MODEL, SMALL_MODEL, SMT_DMT, TEACHER, build_pair
from hf_recurrent.reproduce.smt.training import TRAINING_NOTE, MethodComparison, train_bptt, train_smt_dmt
from hf_recurrent.tasks.example_draws import SPLITS, ExampleDraws

_SAMPLES, _COLUMNS = 32, 8
_DATA = "images"


@dataclass(frozen=True)
class DigitPixels(Task):
    """Images of MNIST as sequences. Inputs are a start token and all pixels but the last, targets are all pixels.

    Ids 0 … `levels` - 1 are grey levels, `levels` is the start token. Examples are images drawn at random, those of
    the split "train" from the training images.

    Args:
        data: directory of the published files.
        crop: pixels left out on each side; the digits fill 20 × 20 of the 28 × 28 pixels.
        pooling: side of the squares of pixels that are averaged.
        levels: number of grey levels, evenly spaced; 2 for black and white.

    Raises:
        FileNotFoundError: files are missing; the message names the setting.
        ValueError: a file is damaged, or the squares do not fit.
    """

    data: str
    crop: int = 0
    pooling: int = 1
    levels: int = 256

    @cached_property
    def _images(self) -> tuple[np.ndarray, np.ndarray, str]:
        train, test, words = load_images("mnist", self.data)
        pixels = []
        for images in (train, test):
            side = math.isqrt(images.images.shape[1])
            inside = slice(self.crop, side - self.crop)
            cropped = images.images.reshape(-1, side, side)[:, inside, inside].reshape(len(images), -1, 1)
            pooled = average_pooled(PixelSequences(cropped, images.labels), self.pooling).images[..., 0]
            pixels.append(pooled.astype(np.int64) * self.levels // 256)
        return *pixels, words

    @property
    def words(self) -> str:
        """Description of the images for the report."""
        return self._images[2]

    @property
    def vocab_size(self) -> int:
        return self.levels + 1

    @property
    def length(self) -> int:
        return self._images[0].shape[1]

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        images = self._images[0 if draws.split == SPLITS[0] else 1]
        targets = images[draws.integers("image", 1, len(images))[:, 0]]
        return np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=self.levels), targets


class PixelMethods(MethodComparison):
    name = "smt-pixels"
    source = "SMT, section 3.2, MNIST"
    claim = (
        "At equal optimizer steps an RNN after SMT→DMT needs fewer bits per pixel than one after BPTT, which sees "
        "little more than the row that it is in, and draws digits."
    )
    note = (
        "{data_used}; {crop} pixels left out at each side, squares of side {pooling} averaged, {levels} "
        "grey levels; " + TRAINING_NOTE + ", {bptt_learning_rate:g} (BPTT); Tc = {context_length}, Tf = "
        "{future_length}, DMT unrolls whole images. Tested on {num_tested:,} draws of the other images. Sequential "
        "operations and tokens are those of the whole training."
    )
    metric = "held-out bits per pixel"
    part_label = "{part}"
    sizes = {
        "small": {
            # Heads that tell pixels side by side from pixels one above the other (docs/log.md).
            "sizes": SMALL_MODEL | {"num_attention_heads": 2, "rope_theta": 100.0},
            "data": "data/mnist", "crop": 4, "pooling": 1, "levels": 2,
            "steps": 1500, "dmt_steps": 500, "batch_size": 16,
            "learning_rate": 5e-3, "dmt_learning_rate": 1e-3, "bptt_learning_rate": 3e-3,
            "context_length": 64, "future_length": 8,
            "timesteps": 8, "dmt_timesteps": 16, "eval_windows": 32, "num_tested": 500,
        },
        "paper": {
            "sizes": PAPER_MODEL,
            "data": "data/mnist", "crop": 0, "pooling": 1, "levels": 256,
            "steps": 151_500, "dmt_steps": 1500, "batch_size": 128, "dmt_batch_size": 32,
            "learning_rate": 3e-4, "dmt_learning_rate": 3e-5, "bptt_learning_rate": 3e-4,
            "context_length": 256, "future_length": 64,
            "timesteps": 1, "dmt_timesteps": 16, "eval_windows": 256, "num_tested": 10_000,
        },
    }  # fmt: skip

    def run(self, settings: Settings) -> dict[str, Any]:
        options = {key: settings[key] for key in ("data", "crop", "pooling", "levels", "seed")}
        task = DigitPixels(**options, num_validation_examples=settings["num_tested"])
        rnn, teacher = build_pair(settings["sizes"], task.vocab_size, settings["seed"])
        if settings["method"] == BPTT:
            results = train_bptt(rnn, task, task, settings, block_size=task.length)
            value = {BPTT: results["measured"]["loss"] / math.log(2)}
        else:
            context_length = min(settings["context_length"], task.length)
            lengths = {"context_length": context_length, "future_length": settings["future_length"]}
            results = train_smt_dmt(rnn, teacher, task, task, settings, **lengths, rollout_length=task.length)
            measured = results["measured"]
            value = {SMT_DMT: measured["loss"] / math.log(2), TEACHER: measured["teacher_bits_per_byte"]}
        _, real = task.examples(np.arange(_SAMPLES), "validation")
        samples = draw_samples(rnn, task, _SAMPLES, settings["seed"])
        return {**results, "value": value, "data_used": task.words, "samples": pack(samples), "images": pack(real)}

    def draw(self, axes: Any, rows: Sequence[Settings]) -> bool:
        rows = [row for row in rows if row["seed"] == rows[0]["seed"]]
        sheets = {_DATA: unpack(rows[0]["images"])} | {row["label"]: unpack(row["samples"]) for row in rows}
        panels = split_axes(axes, 1, 1 + len(sheets), (4 * (1 + len(sheets)), 3))
        draw_table(self, rows, panels[0])
        for panel, (title, images) in zip(panels[1:], sheets.items(), strict=True):
            side = math.isqrt(images.shape[1])
            panel.imshow(image_sheet(images.reshape(-1, side, side), _COLUMNS), cmap="gray")
            panel.set_title(title)
            panel.axis("off")
        return True


@torch.no_grad()
def draw_samples(rnn: Any, task: DigitPixels, count: int, seed: int) -> np.ndarray:
    """Sample images pixel by pixel, (count, T)."""
    rnn.eval()
    begin = torch.full((count, 1), task.levels, device=rnn.device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokens = rnn.generate(
            begin,
            attention_mask=torch.ones_like(begin),
            max_new_tokens=task.length,
            do_sample=True,
            top_k=0,
            suppress_tokens=[task.levels],
            eos_token_id=None,
        )
    return tokens[:, 1:].cpu().numpy()
