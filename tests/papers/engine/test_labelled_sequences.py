"""Data of the long-range tasks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_recurrent import PixelSequences
from papers.engine.labelled_sequences import DATA, accuracy, load_sequences


@pytest.mark.parametrize("as_ids", [False, True])
def test_pixels_are_values_or_tokens(write_digits, as_ids):
    settings = DATA["small"]["pixels"] | {"data": write_digits("t10k", 20, side=4), "as_ids": as_ids}
    train, test = load_sequences(settings)
    assert (len(train), len(test)) == (17, 3)
    (kind,) = {"input_ids", "input_values"} & train[0].keys()
    assert kind == ("input_ids" if as_ids else "input_values")
    levels = train[0][kind].flatten() * (1 if as_ids else 255)
    torch.testing.assert_close(levels.float(), torch.from_numpy(train.images[0].flatten()).float())


def test_both_sizes_have_the_same_kinds():
    assert DATA["small"].keys() == DATA["paper"].keys()
    assert all(DATA[size][kind].keys() == DATA["small"][kind].keys() for size in DATA for kind in DATA[size])


def test_accuracy_counts_all_images():
    class Brightest:
        device = "cpu"

        def eval(self):
            pass

        def __call__(self, input_values, attention_mask):
            return SimpleNamespace(logits=input_values[..., 0])

    images = np.eye(10, dtype=np.uint8)[np.arange(7)].reshape(7, 10, 1) * 200
    assert accuracy(Brightest(), PixelSequences(images, np.array([0, 1, 2, 3, 4, 9, 9])), 7, batch_size=3) == 5 / 7
