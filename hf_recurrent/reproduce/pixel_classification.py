"""Images read pixel by pixel: the data at hand, and one row of mGRADE's tables 1 and 2."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_recurrent.data.document_order import hash_integers
from hf_recurrent.reproduce.experiment import Settings
from hf_recurrent.tasks.pixel_sequences import PixelSequences, sequential_cifar10, sequential_mnist

# Where the set's training files are not at hand, this share of its test images trains and the rest judges.
_TRAINING_SHARE = 0.85
# What appendix C prints for sCIFAR.
PAPER_TRAINING: Settings = {"epochs": 100, "batch_size": 32, "learning_rate": 4e-3, "warmup_share": 0.5}


def load_images(dataset: str, directory: str) -> tuple[PixelSequences, PixelSequences, str]:
    """Training images, test images, and which they are in words.

    Args:
        dataset: "mnist", which also takes the test files alone and divides them, or "cifar".
        directory: where the published files are.

    Raises:
        FileNotFoundError: they are not there; the message names the setting.
        ValueError: a file is damaged or of another format.
    """
    read = {"mnist": sequential_mnist, "cifar": sequential_cifar10}[dataset]
    try:
        test = read(directory, "test")
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"`data` is {directory!r}, but {error}; name the folder with --override data=FOLDER."
        ) from error
    try:
        train = read(directory, "train")
    except FileNotFoundError:
        if dataset == "cifar":
            raise
        order = np.argsort(hash_integers(0, np.arange(len(test))))
        cut = int(len(test) * _TRAINING_SHARE)
        words = f"{cut:,} of the {len(test):,} test images to train, as the training set is not at hand"
        train, test = _chosen(test, order[:cut]), _chosen(test, order[cut:])
    else:
        words = f"{len(train):,} training images"
    return train, test, f"{words}; {len(test):,} others to judge"


def _chosen(data: PixelSequences, indices: np.ndarray) -> PixelSequences:
    return PixelSequences(data.images[indices], data.labels[indices], num_labels=data.num_labels, name=data.name)


def average_pooled(data: PixelSequences, factor: int) -> PixelSequences:
    """The same images with every square of factor × factor pixels as one.

    Raises:
        ValueError: the images are not squares of a multiple of `factor` pixels.
    """
    count, steps, channels = data.images.shape
    side = math.isqrt(steps)
    if side * side != steps or side % factor:
        raise ValueError(f"`pooling` is {factor}; it must divide the images' side, and they have {steps} pixels.")
    squares = data.images.reshape(count, side // factor, factor, side // factor, factor, channels)
    images = np.rint(squares.mean((2, 4))).astype(np.uint8).reshape(count, -1, channels)
    return PixelSequences(images, data.labels, num_labels=data.num_labels, name=data.name)


def run_row(settings: Settings) -> dict[str, Any]:
    """Train a row's classifier and count its right answers to the test images."""
    from transformers import AutoModelForSequenceClassification

    from hf_recurrent import config_from_preset
    from hf_recurrent.reproduce.supervised import build_supervised, train_supervised

    train, test, words = load_images(settings["dataset"], settings["data"])
    if settings["pooling"] > 1:
        train, test = (average_pooled(data, settings["pooling"]) for data in (train, test))
    config = config_from_preset(settings["preset"], **settings["options"])
    model = build_supervised(AutoModelForSequenceClassification, config, settings["seed"])
    results = train_supervised(
        model,
        train,
        steps=max(settings["epochs"] * len(train) // settings["batch_size"], 1),
        batch_size=settings["batch_size"],
        learning_rate=settings["learning_rate"],
        warmup_share=settings["warmup_share"],
        seed=settings["seed"],
    )
    memory = model.memory_footprint().total
    return {**results, "value": accuracy(model, test), "data_used": words, "total_memory": memory}


@torch.no_grad()
def accuracy(model: Any, data: PixelSequences, batch_size: int = 250) -> float:
    """Share of images whose label has the largest output."""
    model.eval()
    right = 0
    for first in range(0, len(data), batch_size):
        pixels = torch.from_numpy(data.images[first : first + batch_size]).to(model.device)
        answers = model(input_values=pixels.float() / 255).logits.argmax(-1).cpu()
        right += int((answers == torch.from_numpy(data.labels[first : first + batch_size])).sum())
    return right / len(data)


def note(rows: Sequence[Settings]) -> str:
    """How the rows were made, and what each model holds at inference."""
    sets = {}
    for row in rows:
        pooled = f", averaged over squares of {row['pooling']} pixels" if row["pooling"] > 1 else ""
        sets[row["dataset"]] = (
            f"{row['data_used']}{pooled}; {row['epochs']} epochs of batches of {row['batch_size']}, learning rate "
            f"{row['learning_rate']:g} with warm-up and cosine"
        )
    memory = {row["label"]: f"{row['total_memory']:,}" for row in rows}
    return (
        "; ".join(f"{name.upper()}: {words}" for name, words in sets.items())
        + ". Parameters and buffer in floats (appendix B): "
        + "; ".join(f"{label} {floats}" for label, floats in memory.items())
        + "."
    )
