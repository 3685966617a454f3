"""Labelled sequences for the long-range tasks: pixels, texts and nested operations, also where none are at hand."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset

from hf_recurrent import ByteTexts, ListOps, byte_text_classification
from hf_recurrent.data.document_order import hash_integers
from hf_recurrent.reproduce.engine.experiment import Settings
from hf_recurrent.reproduce.engine.images import average_pooled, load_images
from hf_recurrent.reproduce.engine.tuning import is_tuning

# Packages whose sources are the two classes of texts where none are given.
_PACKAGES = ("torch", "transformers")
_TRAINING_SHARE = 0.85


def load_sequences(settings: Settings) -> tuple[Dataset, Dataset]:
    """Training and test examples by a row's `task`: "pixels", "texts" or "list_ops". In tuning, the second are other
    examples than those that judge.

    Args:
        settings: a row. Pixels: `dataset` and `data` of [`load_images`], and `pooling`. Texts: `texts`, a directory
            laid out like IMDB, or "packages" for [`package_texts`], and `length`, at which texts are cut. List
            operations: `list_ops`, arguments of [`ListOps`], `num_examples` and `num_tested`.

    Raises:
        FileNotFoundError: the data are not there; the message names the setting.
    """
    return {"pixels": _pixels, "texts": _texts, "list_ops": _list_ops}[settings["task"]](settings)


def _pixels(settings: Settings) -> tuple[Dataset, Dataset]:
    train, test, _ = load_images(settings["dataset"], settings["data"], is_tuning(settings))
    if settings["pooling"] > 1:
        train, test = (average_pooled(data, settings["pooling"]) for data in (train, test))
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
    return _divided(train) if is_tuning(settings) else (train, test)


def _list_ops(settings: Settings) -> tuple[Dataset, Dataset]:
    """The same expressions for all seeds, which are those of the models."""
    judging = "validation" if is_tuning(settings) else "test"
    train = ListOps(settings["num_examples"], "train", **settings["list_ops"])
    return train, ListOps(settings["num_tested"], judging, **settings["list_ops"])


def package_texts(length: int, split: str, num_files: int = 400, per_file: int = 8) -> ByteTexts:
    """Excerpts of `length` bytes from source files of two packages that we depend on; the class is the package, and
    files are in one split only.

    Args:
        num_files, per_file: the largest number of files of a package, and of excerpts of a file, evenly spread.
    """
    texts, labels = [], []
    for label, package in enumerate(_PACKAGES):
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        files = sorted(Path(folder).rglob("*.py"))
        files = files[:: max(len(files) // num_files, 1)][:num_files]
        chosen = hash_integers(0, np.arange(len(files))) % np.uint64(100) < 100 * _TRAINING_SHARE
        for path, trains in zip(files, chosen.tolist(), strict=True):
            if trains == (split == "train"):
                content = path.read_bytes()
                starts = range(0, len(content) - length + 1, length)
                step = max(len(starts) // per_file, 1)
                excerpts = [content[start : start + length] for start in starts[::step][:per_file]]
                texts += excerpts
                labels += [label] * len(excerpts)
    return ByteTexts(texts, labels, list(_PACKAGES), name="packages")


def _divided(data: Any) -> tuple[Dataset, Dataset]:
    order = np.argsort(hash_integers(0, np.arange(len(data)))).tolist()
    cut = int(len(data) * _TRAINING_SHARE)
    return Subset(data, order[:cut]), Subset(data, order[cut:])
