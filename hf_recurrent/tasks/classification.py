"""Labelled sequences for classifiers and the stock `Trainer`: images, texts and list operations; and their batches."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hf_recurrent.argument_checks import check_integer, expand_home
from hf_recurrent.data.document_order import hash_integers
from hf_recurrent.data.pixel_readers import find_idx, read_idx
from hf_recurrent.tasks.example_draws import ExampleDraws, check_split

_OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
_VALUES = (min, max, lambda values: int(median(values)), lambda values: sum(values) % 10)
TOKENS = ("<pad>", *map(str, range(10)), *_OPERATORS, "]")
_FIRST_DIGIT, _FIRST_OPERATOR, _END = 1, 11, 15
_WORDS_AHEAD, _MOST_DRAWS = 4096, 1_000_000


class ListOps(Dataset):
    """Expressions such as `[MAX 4 [MIN 2 9 ] [SM 7 8 ] ]`, and the value of each, a digit.

    Sources: Nangia and Bowman, "ListOps" (2018); lengths and depth of the Long Range Arena (Tay et al., 2021). A node
    above `max_depth` is an operator with probability 1/4 and otherwise a uniform digit. An operator (minimum, maximum,
    median rounded down, or sum modulo 10, with equal probability) has 2 to `max_args` arguments. Whole expressions are
    drawn until one has an allowed length, counted in tokens: digits, operators with their bracket, closing brackets.

    Example i of a split is a pure function of the arguments and i, generated on access (about a millisecond). Items
    are dictionaries of `input_ids` (T,) int64 and `labels`, 0 to 9; `collate_sequences` makes batches. Id 0 is the
    padding, V = 16.

    Args:
        num_examples: number of examples (Long Range Arena: 96,000 for training, 2,000 each for validation and test).
        split: "train", "validation" or "test".
        seed: any integer.
        min_length, max_length: the range of lengths, both included.
        max_depth: levels of an expression, including the digits.
        max_args: the largest number of arguments of an operator.

    Raises:
        ValueError: an unknown split, a number out of range, or lengths that no expression has.
    """

    vocab_size = len(TOKENS)
    num_labels = 10
    pad_token_id = 0
    name = "list_ops"

    def __init__(
        self,
        num_examples: int = 96_000,
        split: str = "train",
        *,
        seed: int = 0,
        min_length: int = 500,
        max_length: int = 2000,
        max_depth: int = 10,
        max_args: int = 10,
    ) -> None:
        check_integer("num_examples", num_examples, 1)
        check_integer("max_depth", max_depth, 1)
        check_integer("max_args", max_args, 2)
        check_integer("min_length", min_length, 1)
        check_integer("max_length", max_length, min_length)
        self.num_examples, self.split, self.seed = num_examples, check_split(split), seed
        self.min_length, self.max_length = min_length, max_length
        self.max_depth, self.max_args = max_depth, max_args
        self[0]  # raises if no expression has such a length

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        if not 0 <= index < self.num_examples:
            raise IndexError(f"example {index} of {self.num_examples}")
        words = self._words(index)
        for _ in range(_MOST_DRAWS):
            expression = self._draw(words)
            if expression is not None:
                tokens, value = expression
                return {"input_ids": torch.tensor(tokens, dtype=torch.int64), "labels": value}
        raise ValueError(
            f"`min_length` is {self.min_length} and `max_length` is {self.max_length}; they must allow one of "
            f"{_MOST_DRAWS:,} expressions with `max_depth` {self.max_depth} and `max_args` {self.max_args}."
        )

    def show(self, index: int = 0) -> str:
        """One expression and its value, as text."""
        example = self[index]
        return f"{' '.join(TOKENS[token] for token in example['input_ids'].tolist())} = {example['labels']}"

    def _words(self, index: int) -> Iterator[int]:
        """The endless random numbers of an example."""
        draws = ExampleDraws(self.seed, self.split, np.array([index]))
        first = 0
        while True:
            yield from draws.words("expression", _WORDS_AHEAD, first)[0].tolist()
            first += _WORDS_AHEAD

    def _draw(self, words: Iterator[int]) -> tuple[list[int], int] | None:
        """Tokens and value of the next expression, or None if its length is out of range."""
        tokens: list[int] = []
        pending: list[tuple[int, int, list[int]]] = []  # open operators: operator, number of arguments, values so far
        while True:
            word = next(words)
            if len(pending) + 1 < self.max_depth and word & 3 == 0:
                operator = (word >> 2) & 3
                tokens.append(_FIRST_OPERATOR + operator)
                pending.append((operator, 2 + (word >> 8) % (self.max_args - 1), []))
            else:
                value = (word >> 8) % 10
                tokens.append(_FIRST_DIGIT + value)
                while pending:
                    operator, count, values = pending[-1]
                    values.append(value)
                    if len(values) < count:
                        break
                    pending.pop()
                    tokens.append(_END)
                    value = _VALUES[operator](values)
                else:
                    return (tokens, value) if self.min_length <= len(tokens) <= self.max_length else None
            if len(tokens) > self.max_length:
                return None


_SEQUENCES = ("input_ids", "input_values")


def collate_sequences(items: Sequence[dict]) -> dict[str, torch.Tensor]:
    """Make a batch of the items of a dataset; the `data_collator` for `transformers.Trainer`.

    `input_ids` (T,) and `input_values` (T, channels) are padded with zeros on the right to the longest;
    `attention_mask` (B, T) int64 is 0 at the padding; `labels` and everything else are stacked.

    Raises:
        ValueError: no items, or items without a sequence.
    """
    present = [name for name in _SEQUENCES if items and name in items[0]]
    if not present:
        raise ValueError(f"`items` holds no sequence; it must hold dictionaries with one of {', '.join(_SEQUENCES)}.")
    batch = {
        name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in items[0] if name not in present
    }
    for name in present:
        batch[name] = pad_sequence([item[name] for item in items], batch_first=True)
    lengths = torch.tensor([len(item[present[0]]) for item in items])
    steps = torch.arange(int(lengths.max()))
    batch["attention_mask"] = (steps < lengths[:, None]).long()
    return batch


_IMDB_LABELS = ("neg", "pos")


class ByteTexts(Dataset):
    """Texts as bytes; `collate_sequences` makes batches. Ids are bytes, V = 256; byte 0 is the padding.

    Items are dictionaries of `input_ids` (T,) int64 and `labels`.

    Args:
        texts: the bytes of each text, not empty.
        labels: a number below `len(label_names)` for each text.
        label_names: the names of the numbers.
        name: for messages and tables.
    """

    vocab_size = 256
    pad_token_id = 0

    def __init__(self, texts: list[bytes], labels: list[int], label_names: list[str], *, name: str = "texts") -> None:
        self.texts, self.labels, self.label_names, self.name = texts, labels, label_names, name

    @property
    def num_labels(self) -> int:
        return len(self.label_names)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        input_ids = np.frombuffer(self.texts[index], dtype=np.uint8).astype(np.int64)
        return {"input_ids": torch.from_numpy(input_ids), "labels": self.labels[index]}


def byte_text_classification(
    directory: str | os.PathLike, split: str | None = None, *, max_length: int | None = 4096
) -> ByteTexts:
    """Byte-level text classification, as on IMDB in the Long Range Arena (Tay et al., 2021).

    Args:
        directory: it has the directories `neg` and `pos`, a text in each .txt file of them (as aclImdb/train has), or
            is the parent of such a directory named `split`.
        split: the subdirectory, "train" or "test" for aclImdb.
        max_length: texts are cut to this number of bytes; None for whole texts. (Long Range Arena: 4000.)

    Raises:
        FileNotFoundError: no directory with `neg` and `pos`.
        ValueError: a text is empty, or there is none.
    """
    if max_length is not None:
        check_integer("max_length", max_length, 1)
    directory = expand_home(directory) / (split or "")
    texts, labels = [], []
    for number, label in enumerate(_IMDB_LABELS):
        folder = directory / label
        if not folder.is_dir():
            raise FileNotFoundError(f"directory not found: {folder} (texts are in {' and '.join(_IMDB_LABELS)})")
        files = sorted(folder.glob("*.txt"))
        if not files:
            raise ValueError(f"{folder} holds no .txt files.")
        for file in files:
            texts.append(file.read_bytes()[:max_length])
            if not texts[-1]:
                raise ValueError(f"{file} is empty.")
        labels += [number] * len(files)
    return ByteTexts(texts, labels, list(_IMDB_LABELS), name=directory.name)


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
    prefix = _MNIST_PREFIXES[check_split(split, _MNIST_PREFIXES)]
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
    names = _CIFAR_FILES[check_split(split, _CIFAR_FILES)]
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
