"""Digits as sequences of pixels, and samples of them."""

import numpy as np
import pytest

from papers import load_experiment
from papers.smt.models import build_pair
from papers.smt.pixels import DigitPixels, draw_samples, from_patches, line_drawing, to_patches

SHAPE = {
    "hidden_size": 8, "num_memory_tokens": 2, "num_attention_heads": 2, "num_hidden_layers": 1, "num_readout_layers": 1
}  # fmt: skip


def test_digits_are_read_pixel_after_pixel(write_digits):
    task = DigitPixels(data=write_digits("t10k", 40, side=8), pooling=2, levels=4)
    assert (task.length, task.vocab_size) == (16, 5)
    inputs, targets = task.examples(np.arange(20))
    assert (inputs[:, 0] == 4).all() and (inputs[:, 1:] == targets[:, :-1]).all()
    assert set(np.unique(targets)) == set(range(4))
    held_out = {tuple(row) for row in task.examples(np.arange(100), "validation")[1].tolist()}
    assert len(held_out) == 6 and not held_out & {tuple(row) for row in task.examples(np.arange(200))[1].tolist()}
    cropped = DigitPixels(data=task.data, crop=1, pooling=3, levels=4)
    whole = DigitPixels(data=task.data)
    square = whole.examples(np.arange(20))[1].reshape(20, 8, 8)[:, 1:4, 1:4]
    assert (cropped.examples(np.arange(20))[1][:, 0] == np.rint(square.mean((1, 2))).astype(int) // 64).all()
    assert task.fingerprint != DigitPixels(data=task.data, pooling=2, levels=2).fingerprint
    samples = draw_samples(build_pair(SHAPE, 5, 0)[0], task, 3, seed=0)
    assert samples.shape == (3, 16) and samples.max() < 4


def test_candidates_are_compared_on_training_images(write_digits):
    folder = write_digits("t10k", 40, side=8)
    judged, tuning = DigitPixels(data=folder), DigitPixels(data=folder, is_tuning=True)
    parts = [
        {tuple(row) for row in task.examples(np.arange(300), split)[1].tolist()}
        for task, split in ((judged, "validation"), (tuning, "train"), (tuning, "validation"))
    ]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 40


def test_missing_digits_are_named(tmp_path):
    experiment = load_experiment("smt-pixels")
    settings = {**experiment.rows("small")[0], "data": str(tmp_path / "nothing"), "seed": 0}
    with pytest.raises(FileNotFoundError, match=r"`data` is '.*nothing', but .*--override data=FOLDER"):
        experiment.run(settings)


def test_patches_are_binary_numbers(write_digits):
    task = DigitPixels(data=write_digits("t10k", 40, side=8), levels=2, patch=2)
    assert (task.length, task.vocab_size) == (16, 17)
    image = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]).reshape(1, -1)
    tokens = to_patches(image, 2)
    assert tokens.tolist() == [[0b1011, 0, 0, 0b0110]]
    assert (from_patches(tokens, 2) == image).all()
    inputs, targets = task.examples(np.arange(5))
    assert (inputs[:, 0] == 16).all() and targets.max() < 16
    with pytest.raises(ValueError, match="`patch` is 2 and `levels` 4; patches need 2 levels"):
        DigitPixels(data=task.data, levels=4, patch=2)


def test_the_line_drawing_is_closed_and_fits():
    image = line_drawing(28).reshape(28, 28)
    assert set(np.unique(image)) == {0, 1} and 60 < image.sum() < 200
    assert image[:2].sum() == 0  # above the ears
