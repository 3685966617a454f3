"""Images from the published files: division of the test images, pooling, error messages."""

import numpy as np
import pytest

from hf_recurrent import PixelSequences
from papers import load_experiment
from papers.engine.images import average_pooled, load_images, padded


def test_test_digits_alone_are_divided(write_digits):
    folder = write_digits("t10k", 40)
    train, test, words = load_images("mnist", folder)
    numbers = [data.images[:, 0, 0].tolist() for data in (train, test)]
    assert [len(part) for part in numbers] == [34, 6] and sorted(numbers[0] + numbers[1]) == list(range(40))
    assert numbers[0] != sorted(numbers[0])
    for data in (train, test):
        assert (data.labels == data.images[:, 0, 0] % 10).all()
    assert words == "34 of the 40 test images to train, as the training set is not at hand; 6 others to judge"
    again = load_images("mnist", folder)[0]
    assert np.array_equal(again.images, train.images)


def test_training_files_are_read_where_they_are(write_digits):
    write_digits("t10k", 7)
    train, test, words = load_images("mnist", write_digits("train", 20))
    assert (len(train), len(test), words) == (20, 7, "20 training images; 7 others to judge")


@pytest.mark.parametrize("label", ["sMNIST: mGRADE-CD", "grey sCIFAR: minGRU"])
def test_missing_images_are_named(label, tmp_path):
    row = next(row for row in load_experiment("mgrade-table1").rows("paper") if row["label"] == label)
    folder = str(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"`data` is '.*nothing', but file not found.*--override data=FOLDER"):
        load_experiment("mgrade-table1").run({**row, "data": folder, "seed": 0})


def test_pooling_averages_squares():
    image = np.arange(16, dtype=np.uint8).reshape(1, 16, 1)
    pooled = average_pooled(PixelSequences(image, np.array([3])), 2)
    # Half to even: 2.5, 4.5, 10.5, 12.5.
    assert pooled.images[0, :, 0].tolist() == [2, 4, 10, 12] and pooled.labels.tolist() == [3]
    with pytest.raises(ValueError, match="`pooling` is 3; it must divide the images' side, and they have 16 pixels"):
        average_pooled(PixelSequences(image, np.array([3])), 3)


def test_candidates_are_compared_on_training_images(write_digits):
    folder = write_digits("t10k", 40)
    judged, tuning = load_images("mnist", folder), load_images("mnist", folder, is_tuning=True)
    numbers = [set(data.images[:, 0, 0].tolist()) for data in (*tuning[:2], judged[1])]
    assert sum(map(len, numbers)) == len(set.union(*numbers)) == 40 and len(numbers[1]) == 6


def test_pixels_are_added_around_the_image():
    images = PixelSequences(np.arange(1, 5, dtype=np.uint8).reshape(1, 4, 1), np.zeros(1, dtype=np.int64))
    assert padded(images, 1).images.reshape(4, 4).tolist() == [[0] * 4, [0, 1, 2, 0], [0, 3, 4, 0], [0] * 4]
