"""MNIST and CIFAR-10 as sequences of pixels, from the published files."""

import math
from functools import partial

import numpy as np

from hf_recurrent import PixelSequences, hash_integers, sequential_cifar10, sequential_mnist
from papers.engine.experiment import Settings

# Share of a data set that trains where it is divided; the others test.
TRAINING_SHARE = 0.85


def load_images(dataset: str, directory: str, is_tuning: bool = False) -> tuple[PixelSequences, PixelSequences, str]:
    """Training images, test images, and their description for the report.

    Args:
        dataset: "mnist", for which the test files alone are enough and are divided, "cifar" (grey) or "cifar-colour".
        directory: directory of the published files.
        is_tuning: test on a part of the training images.

    Raises:
        FileNotFoundError: files are missing; the message names the setting.
        ValueError: a file is damaged or has another format.
    """
    read = {
        "mnist": sequential_mnist, "cifar": sequential_cifar10, "cifar-colour": partial(sequential_cifar10, grey=False)
    }[dataset]  # fmt: skip
    try:
        test = read(directory, "test")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`data` is {directory!r}, but {error}; name the folder with --override data=FOLDER."
        ) from error
    try:
        train = read(directory, "train")
        words = f"{len(train):,} training images"
    except FileNotFoundError:
        if dataset != "mnist":
            raise
        total = len(test)
        train, test = _divided(test)
        words = f"{len(train):,} of the {total:,} test images to train, as the training set is not at hand"
    if is_tuning:
        train, test = _divided(train)
    return train, test, f"{words}; {len(test):,} others to judge"


def load_pixels(settings: Settings) -> tuple[PixelSequences, PixelSequences, str]:
    """[`load_images`] of a row's `dataset` and `data`, averaged by its `pooling`, and with `padding` if it has any."""
    train, test, words = load_images(settings["dataset"], settings["data"], settings.get("is_tuning", False))
    if settings["pooling"] > 1:
        train, test = (average_pooled(data, settings["pooling"]) for data in (train, test))
    if settings.get("padding"):
        train, test = (padded(data, settings["padding"]) for data in (train, test))
    return train, test, words


def divided_numbers(count: int) -> list[np.ndarray]:
    """Numbers of the examples that train, and of those that test where a data set is divided, in random orders."""
    order = np.argsort(hash_integers(0, np.arange(count)))
    return np.split(order, [int(count * TRAINING_SHARE)])


def _divided(data: PixelSequences) -> tuple[PixelSequences, PixelSequences]:
    return tuple(_like(data, data.images[part], data.labels[part]) for part in divided_numbers(len(data)))


def _like(data: PixelSequences, images: np.ndarray, labels: np.ndarray) -> PixelSequences:
    return PixelSequences(images, labels, num_labels=data.num_labels, name=data.name)


def padded(data: PixelSequences, pixels: int) -> PixelSequences:
    """The same square images with black pixels added at each side."""
    count, steps, channels = data.images.shape
    side = math.isqrt(steps)
    squares = data.images.reshape(count, side, side, channels)
    images = np.pad(squares, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0))).reshape(count, -1, channels)
    return _like(data, images, data.labels)


def average_pooled(data: PixelSequences, factor: int) -> PixelSequences:
    """The same images with every square of factor × factor pixels, which must divide their side, averaged to one."""
    count, steps, channels = data.images.shape
    side = math.isqrt(steps)
    if side * side != steps or side % factor:
        raise ValueError(f"`pooling` is {factor}; it must divide the images' side, and they have {steps} pixels.")
    squares = data.images.reshape(count, side // factor, factor, side // factor, factor, channels)
    images = np.rint(squares.mean((2, 4))).astype(np.uint8).reshape(count, -1, channels)
    return _like(data, images, data.labels)
