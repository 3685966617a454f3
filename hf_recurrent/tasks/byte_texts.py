"""Labelled texts as sequences of bytes, from directories laid out like IMDB or from JSONL files."""

import os
import re
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_recurrent.argument_checks import expand_home
from hf_recurrent.data.readers import json_rows
from hf_recurrent.tasks.example_draws import check_integer

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
    path: str | os.PathLike,
    split: str | None = None,
    *,
    max_length: int | None = 4096,
    text_column: str = "text",
    label_column: str = "label",
    label_names: list[str] | None = None,
) -> ByteTexts:
    """Byte-level text classification, as on IMDB in the Long Range Arena (Tay et al., 2021).

    Args:
        path: one of

            * a directory with the directories `neg` and `pos`, a text in each of their .txt files (IMDB's
              aclImdb/train), or the parent of such a directory named `split`;
            * a .jsonl file (.ndjson) with a text and its label in each row.
        split: the subdirectory, "train" or "test" for aclImdb; not for files.
        max_length: texts are cut to this number of bytes; None for whole texts. (Long Range Arena: 4000.)
        text_column, label_column: the columns of text and label.
        label_names: the labels in the order of their numbers; by default 0, 1, … if labels are numbers, else the
            sorted names. Needed if a split may lack a label.

    Raises:
        FileNotFoundError: no such file, or no directory with `neg` and `pos`.
        ValueError: another type of file, a row that is damaged or lacks a column, an empty text, or an unknown label.
    """
    path = expand_home(path)
    if max_length is not None:
        check_integer("max_length", max_length, 1)
    if path.is_dir():
        return _read_directory(path / split if split else path, max_length)
    if split is not None and path.exists():
        raise ValueError(f"`split` is {split!r}; for a file such as {path} it must be None.")
    if not path.is_file():
        raise FileNotFoundError(f"file not found: {path}")
    if path.suffix.lower() not in (".jsonl", ".ndjson"):
        raise ValueError(f"`path` is {str(path)!r}; it must be a directory or end in .jsonl or .ndjson.")
    texts, labels = [], []
    for name, row in json_rows(path):
        for column in (text_column, label_column):
            if row.get(column) is None:
                raise ValueError(f"{name} has no column {column!r}; it has {', '.join(map(str, row))}.")
        text, label = row[text_column], row[label_column]
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} has the text {text!r}; it must be a string that is not empty.")
        if isinstance(label, bool) or not isinstance(label, str | int):
            raise ValueError(f"{name} has the label {label!r}; it must be a name or an integer.")
        texts.append(text.encode("utf-8", "surrogatepass")[:max_length])
        labels.append(str(label))
    if not texts:
        raise ValueError(f"{path} is empty: it holds no texts.")
    names = _label_names(labels) if label_names is None else list(label_names)
    numbers = {label: number for number, label in enumerate(names)}
    if unknown := sorted(set(labels) - set(names)):
        raise ValueError(f"{path} has the label {unknown[0]!r}; it must be one of {', '.join(names)}.")
    return ByteTexts(texts, [numbers[label] for label in labels], names, name=path.stem)


def _read_directory(directory: Path, max_length: int | None) -> ByteTexts:
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


def _label_names(labels: list[str]) -> list[str]:
    names = sorted(set(labels))
    if all(re.fullmatch("0|[1-9][0-9]{0,3}", name) for name in names):
        return [str(number) for number in range(max(map(int, names)) + 1)]
    return names
