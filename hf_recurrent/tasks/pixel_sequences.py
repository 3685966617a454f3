"""Images as sequences of pixels, from the published files of MNIST and CIFAR-10."""

import os
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_recurrent.argument_checks import expand_home
from hf_recurrent.data.document_order import hash_integers
from hf_recurrent.data.pixel_readers import find_idx, read_idx

_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + 3 * 32 * 32
_CIFAR_FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
_MNIST_PREFIXES = {"train": "train", "test": "t10k"}
_LUMINANCE = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601


class PixelSequences(Dataset):
    """Images row by row, one pixel per step.

    Items are dictionaries of `labels` and one of

    * `input_values` (T, channels) float32, levels / 255;
    * `input_ids` (T · channels,) int64, the levels themselves (V = 256), the channels of a pixel in a row.

    Args:
        images: (images, T, channels) uint8.
        labels: (images,) integers.
        as_ids: items with `input_ids` instead of `input_values`.
        num_labels: number of classes.
        name: for messages and tables.
    """

    vocab_size = 256

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        as_ids: bool = False,
        num_labels: int = 10,
        name: str = "pixels",
    ) -> None:
        self.images, self.labels = images, labels.astype(np.int64)
        self.as_ids, self.num_labels, self.name = as_ids, num_labels, name

    @property
    def length(self) -> int:
        """T, steps of a sequence."""
        steps, channels = self.images.shape[1:]
        return steps * channels if self.as_ids else steps

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        pixels = torch.tensor(self.images[index])
        label = int(self.labels[index])
        if self.as_ids:
            return {"input_ids": pixels.flatten().long(), "labels": label}
        return {"input_values": pixels.float() / 255, "labels": label}


def sequential_mnist(
    directory: str | os.PathLike,
    split: str = "train",
    *,
    as_ids: bool = False,
    permutation_seed: int | None = None,
) -> PixelSequences:
    """MNIST (or a dataset of the same format, such as Fashion-MNIST): 28 × 28 grey levels as 784 steps.

    Args:
        directory: holds `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`, or the `t10k` files of the test set,
            plain or .gz.
        split: "train" or "test".
        as_ids: ids instead of real values, see [`PixelSequences`].
        permutation_seed: put the pixels of all images into one random order (permuted sequential MNIST).

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: an unknown split, or a file that is damaged or of another format.
    """
    prefix = _file_names(_MNIST_PREFIXES, split)
    images = read_idx(find_idx(directory, f"{prefix}-images", 3), num_dimensions=3)
    path = find_idx(directory, f"{prefix}-labels", 1)
    labels = read_idx(path, num_dimensions=1)
    if len(images) != len(labels):
        raise ValueError(f"{path} has {len(labels)} labels, but there are {len(images)} images; they must be equal.")
    _check_labels(path, labels)
    pixels, name = images.reshape(len(images), -1, 1), "sequential_mnist"
    if permutation_seed is not None:
        name = "permuted_mnist"
        pixels = pixels[:, np.argsort(hash_integers(permutation_seed, np.arange(pixels.shape[1])))]
    return PixelSequences(pixels, labels, as_ids=as_ids, name=name)


def sequential_cifar10(
    directory: str | os.PathLike, split: str = "train", *, grey: bool = True, as_ids: bool = False
) -> PixelSequences:
    """CIFAR-10: 32 × 32 pixels as 1024 steps of one grey level or three colours.

    Args:
        directory: the unpacked *binary version* (cifar-10-binary.tar.gz) with `data_batch_1.bin` … and
            `test_batch.bin`, or its parent directory.
        split: "train" or "test".
        grey: one luminance (ITU-R BT.601) instead of red, green, blue.
        as_ids: ids instead of real values (in colour 3072 steps), see [`PixelSequences`].

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: an unknown split, or a file that is damaged or of another format.
    """
    names = _file_names(_CIFAR_FILES, split)
    parent = expand_home(directory)
    directory = next(
        (folder for folder in (parent, parent / "cifar-10-batches-bin") if (folder / names[0]).is_file()), None
    )
    if directory is None:
        raise FileNotFoundError(f"file not found: {parent / names[0]} (of cifar-10-binary.tar.gz, the binary version)")
    records = np.concatenate([_read_cifar_records(directory / name) for name in names])
    images = records[:, 1:].reshape(len(records), *_CIFAR_SHAPE).transpose(0, 2, 3, 1).reshape(len(records), -1, 3)
    if grey:
        # In pieces, because all images as float64 would be half a gigabyte.
        pieces = np.array_split(images, max(1, len(images) // 1000))
        images = np.concatenate([np.rint(piece @ _LUMINANCE).astype(np.uint8) for piece in pieces])[..., None]
    name = "sequential_cifar10_grey" if grey else "sequential_cifar10"
    return PixelSequences(np.ascontiguousarray(images), records[:, 0], as_ids=as_ids, name=name)


def _file_names(files: dict, split: str):
    if split not in files:
        raise ValueError(f"`split` is {split!r}; it must be one of {', '.join(files)}.")
    return files[split]


def _read_cifar_records(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"file not found: {path}")
    data = np.fromfile(path, dtype=np.uint8)
    if not len(data) or len(data) % _CIFAR_RECORD:
        raise ValueError(
            f"{path} is truncated or of another format: it has {len(data)} bytes; they must be a multiple of "
            f"{_CIFAR_RECORD} (a label, 32 x 32 x 3 levels)."
        )
    records = data.reshape(-1, _CIFAR_RECORD)
    _check_labels(path, records[:, 0])
    return records


def _check_labels(path: Path, labels: np.ndarray) -> None:
    if labels.max() > 9:
        raise ValueError(
            f"{path} is damaged or of another format: it has the label {labels.max()}; labels must be from 0 to 9."
        )
