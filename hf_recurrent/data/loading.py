"""From the name of a source to its corpus: packed once, memory-mapped from then on."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.packing import FORMAT, fingerprint, pack_once
from hf_recurrent.data.pixel_readers import has_test_files, pixel_format
from hf_recurrent.data.sources import resolve
from hf_recurrent.data.token_encoding import TokenEncoding


def load_corpus(
    source: str | os.PathLike | Sequence[str | os.PathLike] = "python",
    *,
    tokenizer: Any = None,
    text_column: str = "text",
    split: str = "train",
    config_name: str | None = None,
    streaming: bool = False,
    max_bytes: int | None = None,
    binary: bool = False,
    cache_dir: str | os.PathLike | None = None,
) -> Corpus:
    """Read documents and pack them, once, into a memory-mapped corpus.

    Args:
        source: one of these, or a list of them:

            * `"python"`: the source of the running Python's standard library, one file an episode;
            * a path, a glob pattern (`**` for folders) or a directory (all files below it). Formats by suffix, each
              also as .gz or .zst: .jsonl/.ndjson and .parquet (a row is an episode), .fasta/.fa/.fna (a record is
              an episode); any other file is text, UTF-8, one episode;
            * a directory written by `datasets.Dataset.save_to_disk`;
            * `"hub:owner/name"`: a dataset of the Hub, or a local folder of the same layout;
            * `"mnist:FOLDER"`: MNIST as it is published (IDX, also .gz), 784 grey levels an episode, V = 256;
            * `"images:FOLDER"`: all images below, each as 64 × 64 binary pixels, of which 2 × 2 are a token: 1024 an
              episode, V = 16. With the folders `train` and `test` in it, those are its splits. Needs Pillow.
        tokenizer: `ByteTokenizer`, `DNATokenizer` or another of that kind; without one the ids are the bytes. Not
            for images, whose tokens are given and have no end id.
        text_column: where rows have their text.
        split: the split of a dataset; of images, "train" or "test".
        config_name: the configuration of a Hub dataset ("sample-10BT").
        streaming: read a Hub dataset over the network while packing, without downloading it first. What was packed
            is used again; a dataset that changed on the Hub since is not noticed.
        max_bytes: take documents in order while they fit in, never a part of one.
        binary: byte 0 is data: files are raw bytes, and episodes have no end byte.
        cache_dir: where packed corpora lie; by default `hf_recurrent/corpora` in the Hugging Face cache.

    A packed corpus is found again as long as the names, sizes and times of the files and the options are the same.
    Empty documents are left out. Packing needs constant memory, and shows a progress bar when it takes long.

    Raises:
        FileNotFoundError: the source is not there.
        ValueError: the source is empty, damaged, not UTF-8, holds byte 0 without `binary`, or has no such column or
            split; the message names the file and what is allowed.
        ImportError: an optional package is missing.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}, allowed is at least 1, or None for all")
    if not isinstance(source, str | os.PathLike):
        source = list(source)
    pixels = pixel_format(source)
    encoding = TokenEncoding(tokenizer, binary) if pixels is None else pixels.encoding()
    parts = resolve(
        source,
        text_column=text_column,
        split=split,
        config_name=config_name,
        streaming=streaming,
        binary=binary,
    )
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else ", ".join(map(os.fspath, source))
    options = [FORMAT, encoding.key(), text_column, max_bytes, binary]
    directory = _cache_directory(cache_dir) / fingerprint([options, [part.key() for part in parts]])
    documents = (document for part in parts for document in part.documents())
    pack_once(directory, lambda: documents, encoding, name, max_bytes)
    return Corpus.open(directory, name, unit="byte" if pixels is None else "pixel")


def load_splits(
    source: str | os.PathLike | Sequence[str | os.PathLike] = "python",
    *,
    validation_fraction: float = 0.05,
    split_seed: int = 0,
    split: str = "train",
    **options: Any,
) -> tuple[Corpus, Corpus]:
    """Training and validation corpus of a source.

    Images that come with test files (`mnist:`, `images:`) are validated on all of those; of anything else, a part is
    held out by [`Corpus.split`].

    Args:
        source, split, options: see [`load_corpus`].
        validation_fraction, split_seed: see [`Corpus.split`].

    Raises:
        FileNotFoundError, ValueError, ImportError: those of [`load_corpus`] and [`Corpus.split`].
    """
    train = load_corpus(source, split=split, **options)
    if split == "train" and has_test_files(source):
        return train, load_corpus(source, split="test", **options)
    return train.split(validation_fraction, split_seed)


def _cache_directory(cache_dir: str | os.PathLike | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "hf_recurrent" / "corpora"
