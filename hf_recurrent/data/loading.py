"""`load_corpus` and `load_splits`, which pack documents once, and `stream_documents`, which does not."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from hf_recurrent.argument_checks import expand_home
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.dataset_sources import dataset_name, is_dataset, load_hub_dataset, stream_files, streamable
from hf_recurrent.data.documents import ReadOptions
from hf_recurrent.data.packing import FORMAT, Packing, fingerprint, pack_by_content, pack_once
from hf_recurrent.data.pixel_readers import has_test_files, pixel_format
from hf_recurrent.data.sources import HUB_PREFIX, known_bytes, list_files, resolve
from hf_recurrent.data.streamed_documents import StreamedDocuments
from hf_recurrent.data.token_encoding import TokenEncoding

# A name or path, a dataset of the `datasets` library, or a list of these.
Source = Any


def load_corpus(
    source: Source = "python",
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

    A packed corpus is reused while the options and the names, sizes and modification times of the files stay the
    same; a damaged one is packed again. Empty documents are skipped. Packing uses constant memory, and shows a
    progress bar if it takes long. A line of JSON or a row of Parquet may have 256 MiB, and a compressed file may
    expand to 1 GiB or 1,000 times its size; other documents may be of any length.

    An `IterableDataset` does not tell whether it has changed, so it is packed at every call; an endless one needs
    `max_bytes`.

    Args:
        source: one of these, or a list of them:

            * `"python"`: the standard library of the running Python, one episode per file;
            * a path, a glob pattern (`**` for folders) or a directory (all files below it). Formats by suffix, each
              also as .gz or .zst: .jsonl/.ndjson and .parquet (one episode per row), .fasta/.fa/.fna (one episode per
              record); any other file is UTF-8 text, one episode;
            * a `datasets.Dataset` or `IterableDataset`, or a `DatasetDict` of which `split` is taken: every row is an
              episode, its text or bytes in `text_column`;
            * a directory written by `datasets.Dataset.save_to_disk`;
            * `"hub:owner/name"`: a dataset of the Hub, or a local folder of the same layout;
            * `"mnist:FOLDER"`: the published MNIST files (IDX, also .gz), 784 grey levels per episode, V = 256;
            * `"images:FOLDER"`: all images below it, each as 64 × 64 binary pixels; a token is a patch of 2 × 2, so
              1,024 tokens per episode, V = 16. Subfolders `train` and `test` are its splits. Requires Pillow.
        tokenizer: a tokenizer like `ByteTokenizer` or `DNATokenizer`; None for bytes. Not for images, whose tokens are
            fixed and have no end id.
        text_column: name of the column with the text. Example: "content".
        split: split of a dataset; for images, "train" or "test".
        config_name: configuration of a Hub dataset. Example: "sample-10BT".
        streaming: stream a Hub dataset while packing, without downloading it first. The packed corpus is reused even
            after the dataset changes on the Hub.
        max_bytes: take whole documents in order up to this total.
        binary: byte 0 is data: files are raw bytes, and episodes have no end byte.
        cache_dir: directory of packed corpora; by default `hf_recurrent/corpora` in the Hugging Face cache.

    Raises:
        FileNotFoundError: the source does not exist.
        ValueError: the source is empty, damaged, too large, not UTF-8, contains byte 0 without `binary`, or lacks the
            column or split; the message names the file.
        OSError: the packed corpus cannot be written.
        ImportError: an optional package is missing.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"`max_bytes` is {max_bytes}; it must be 1 or more, or None for all documents.")
    sources, cache = _as_list(source), Path(constants.HF_HOME) / "hf_recurrent" / "corpora"
    if cache_dir is not None:
        cache = expand_home(cache_dir)
    pixels = pixel_format(sources)
    encoding = TokenEncoding(tokenizer, binary) if pixels is None else pixels.encoding()
    parts = resolve(sources, ReadOptions(text_column, split, config_name, streaming, binary))
    name = ", ".join(map(_name, sources))
    documents = (document for part in parts for document in part.documents())
    packing = Packing(documents, encoding, name, max_bytes, known_bytes(parts))
    keys = [part.key for part in parts]
    if None in keys:
        directory = pack_by_content(cache, packing)
    else:
        content = [FORMAT, encoding.key(), text_column, max_bytes, binary]
        directory = cache / fingerprint([content, keys])
        pack_once(directory, packing)
    return Corpus.open(directory, name, unit="byte" if pixels is None else "pixel")


def load_splits(
    source: Source = "python",
    *,
    validation_fraction: float = 0.05,
    split_seed: int = 0,
    split: str = "train",
    **options: Any,
) -> tuple[Corpus, Corpus]:
    """Load training and validation corpus of a source.

    The validation corpus of images with test files (`mnist:`, `images:`) is all of those; otherwise [`Corpus.split`]
    holds out a part.

    Args:
        source, split, options: see [`load_corpus`].
        validation_fraction, split_seed: see [`Corpus.split`].

    Raises:
        FileNotFoundError, ValueError, ImportError: see [`load_corpus`] and [`Corpus.split`].
    """
    train = load_corpus(source, split=split, **options)
    if split == "train" and has_test_files(_as_list(source)):
        return train, load_corpus(source, split="test", **options)
    return train.split(validation_fraction, split_seed)


def stream_documents(
    source: Source,
    *,
    tokenizer: Any = None,
    text_column: str = "text",
    split: str = "train",
    config_name: str | None = None,
    binary: bool = False,
) -> StreamedDocuments:
    """Read documents while they stream, without packing them.

    Args:
        source: a path, a glob pattern, a directory, or a list of these, with JSONL or Parquet files only, each file a
            shard; `"hub:owner/name"`, or a local folder of the same layout; or a `datasets.IterableDataset`, or an
            `IterableDatasetDict` of which `split` is taken.
        tokenizer, text_column, split, config_name, binary: see [`load_corpus`].

    Raises:
        FileNotFoundError, ValueError, ImportError: see [`load_corpus`].
    """
    sources, content = _as_list(source), None
    name, options = ", ".join(map(_name, sources)), ReadOptions(text_column, split, config_name, True, binary)
    hub = [each for each in sources if is_dataset(each) or os.fspath(each).startswith(HUB_PREFIX)]
    if hub and len(sources) > 1:
        raise ValueError(
            f"`source` is {name}; datasets that are not packed cannot be joined: give one, or mix them (Mixture, "
            "`--corpus_probabilities`)."
        )
    if not hub:
        files = [file for each in sources for file in list_files(expand_home(each), os.fspath(each))]
        dataset = stream_files(files)
        content = fingerprint([[file.name, file.stat().st_size] for file in files])
    elif is_dataset(hub[0]):
        dataset = streamable(hub[0], split)
    else:
        dataset, _ = load_hub_dataset(hub[0].removeprefix(HUB_PREFIX), options)
    return StreamedDocuments(
        dataset, tokenizer=tokenizer, text_column=text_column, binary=binary, name=name, fingerprint=content
    )


def _as_list(source: Any) -> list:
    if isinstance(source, str | os.PathLike) or is_dataset(source):
        return [source]
    if not isinstance(source, Iterable):
        raise ValueError(
            f"`source` is of type {type(source).__name__}; it must be a name or path, a dataset, or a list of these."
        )
    return list(source)


def _name(source: Any) -> str:
    return dataset_name(source) if is_dataset(source) else os.fspath(source)
