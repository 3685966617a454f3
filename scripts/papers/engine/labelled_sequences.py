"""Labelled sequences for the long-range tasks: pixels, texts and nested operations, also where none are at hand."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from hf_recurrent import ByteTexts, ListOps, PixelSequences, byte_text_classification, collate_sequences, hash_integers
from papers.engine.experiment import Settings
from papers.engine.images import TRAINING_SHARE, divided_numbers, load_pixels
from papers.engine.supervised import train_supervised

# Packages whose sources are the two classes of texts where none are given.
_PACKAGES = ("torch", "transformers")
# The largest number of files of a package, and of excerpts of a file, evenly spread.
_NUM_FILES, _PER_FILE = 400, 8
# Size → kind → settings of a row: what is at hand, and what the papers have.
DATA: dict[str, dict[str, Settings]] = {
    "small": {
        "pixels": {"task": "pixels", "dataset": "mnist", "data": "data/mnist", "pooling": 2},
        "texts": {"task": "texts", "texts": "packages", "length": 128},
        "list_ops": {
            "task": "list_ops", "num_examples": 10_000,
            "list_ops": {"min_length": 5, "max_length": 60, "max_depth": 4, "max_args": 4},
        },
    },
    "paper": {
        "pixels": {"task": "pixels", "dataset": "cifar-colour", "data": "data/cifar10", "pooling": 1},
        "texts": {"task": "texts", "texts": "data/aclImdb", "length": 4000},
        "list_ops": {"task": "list_ops", "num_examples": 96_000, "list_ops": {}},
    },
}  # fmt: skip


def load_sequences(settings: Settings) -> tuple[Dataset, Dataset]:
    """Training and test examples by a row's `task`: "pixels", "texts" or "list_ops". In tuning, the second are other
    examples than those that judge.

    Args:
        settings: a row. Pixels: `dataset` and `data` of [`load_images`], `pooling`, and `as_ids` for grey levels as
            tokens. Texts: `texts`, a directory laid out like IMDB, or "packages" for [`package_texts`], and `length`,
            at which texts are cut. List operations: `list_ops`, arguments of [`ListOps`], `num_examples` and
            `num_tested`.

    Raises:
        FileNotFoundError: the data are not there; the message names the setting.
    """
    return {"pixels": _pixels, "texts": _texts, "list_ops": _list_ops}[settings["task"]](settings)


def _pixels(settings: Settings) -> tuple[Dataset, Dataset]:
    train, test, _ = load_pixels(settings)
    if settings.get("as_ids"):
        train, test = (PixelSequences(data.images, data.labels, as_ids=True) for data in (train, test))
    return train, test


def _texts(settings: Settings) -> tuple[Dataset, Dataset]:
    if settings["texts"] == "packages":
        train, test = (package_texts(settings["length"], split) for split in ("train", "test"))
    else:
        try:
            train, test = (
                byte_text_classification(settings["texts"], split, max_length=settings["length"])
                for split in ("train", "test")
            )
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"`texts` is {settings['texts']!r}, but {error}; name the folder with --override texts=FOLDER."
            ) from error
    if settings.get("is_tuning"):
        train, test = (Subset(train, part.tolist()) for part in divided_numbers(len(train)))
    return train, test


def _list_ops(settings: Settings) -> tuple[Dataset, Dataset]:
    """The same expressions for all seeds, which belong to the models."""
    judging = "validation" if settings.get("is_tuning") else "test"
    train = ListOps(settings["num_examples"], "train", **settings["list_ops"])
    return train, ListOps(settings["num_tested"], judging, **settings["list_ops"])


def train_and_test(model: Any, settings: Settings, trained: Any = None) -> dict[str, Any]:
    """Train a classifier on the sequences of a row; results with the accuracy as `value`.

    Args:
        model: the classifier.
        settings: the settings of [`load_sequences`], and `warmup_share`, `weight_decay`, `num_tested`.
        trained: the module with the classifier's parameters and its loss, by default the classifier itself.
    """
    train, test = load_sequences(settings)
    results = train_supervised(
        model if trained is None else trained,
        train,
        settings,
        warmup_share=settings["warmup_share"],
        weight_decay=settings["weight_decay"],
        collator=collate_sequences,
    )
    return {**results, "value": accuracy(model, test, settings["num_tested"])}


@torch.no_grad()
def accuracy(model: Any, data: Dataset, num_tested: int, batch_size: int = 100) -> float:
    """Share of sequences whose label has the largest logit, among `num_tested` spread over the data."""
    model.eval()
    count = min(num_tested, len(data))
    chosen = Subset(data, [index * len(data) // count for index in range(count)])
    right = 0
    for batch in DataLoader(chosen, batch_size, collate_fn=collate_sequences):
        labels = batch.pop("labels")
        logits = model(**{name: value.to(model.device) for name, value in batch.items()}).logits
        right += int((logits.argmax(-1).cpu() == labels).sum())
    return right / count


def package_texts(length: int, split: str) -> ByteTexts:
    """Excerpts of `length` bytes from source files of two packages that we depend on; the class is the package, and
    files are in one split only."""
    texts, labels = [], []
    for label, package in enumerate(_PACKAGES):
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        files = sorted(Path(folder).rglob("*.py"))
        files = files[:: max(len(files) // _NUM_FILES, 1)][:_NUM_FILES]
        chosen = hash_integers(0, np.arange(len(files))) % np.uint64(100) < 100 * TRAINING_SHARE
        for path, trains in zip(files, chosen.tolist(), strict=True):
            if trains == (split == "train"):
                content = path.read_bytes()
                starts = range(0, len(content) - length + 1, length)
                step = max(len(starts) // _PER_FILE, 1)
                excerpts = [content[start : start + length] for start in starts[::step][:_PER_FILE]]
                texts += excerpts
                labels += [label] * len(excerpts)
    return ByteTexts(texts, labels, list(_PACKAGES), name="packages")
