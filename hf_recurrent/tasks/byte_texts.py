"""Labelled texts as sequences of bytes, from directories laid out like IMDB."""

import os

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_recurrent.argument_checks import expand_home
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
