"""Digits as sequences of pixels, and samples of them."""

import numpy as np
import pytest

from hf_recurrent.reproduce import load_experiment
from hf_recurrent.reproduce.smt.models import build_pair
from hf_recurrent.reproduce.smt.pixels import DigitPixels, draw_samples

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


def test_missing_digits_are_named(tmp_path):
    experiment = load_experiment("smt-pixels")
    settings = {**experiment.rows("small")[0], "data": str(tmp_path / "nothing"), "seed": 0}
    with pytest.raises(FileNotFoundError, match=r"`data` is '.*nothing', but .*--override data=FOLDER"):
        experiment.run(settings)
