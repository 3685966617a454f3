"""Datasets of the `datasets` library as sources: given as objects, saved in a directory, or on the Hub."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hf_recurrent.argument_checks import import_optional
from hf_recurrent.checkpoints.hub_repositories import check_repository
from hf_recurrent.data.documents import (
    Document,
    ReadOptions,
    Source,
    column_bytes,
    file_stamp,
    files_below,
    missing_column,
)

_ROWS_AT_ONCE = 256
# Suffix of a file → the loader of `datasets` that reads it row by row.
_STREAMED_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json"}


@contextmanager
def read_errors(name: str) -> Iterator[None]:
    """Turn the errors of damaged data into a ValueError that names the source."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error


def _source(name: str, dataset: Any, identity: list | None, text_column: str) -> Source:
    """A `Dataset` or `IterableDataset` as a source. `identity` is JSON that no other dataset has, if there is such."""
    key = None if identity is None else ["dataset", identity, text_column]
    return Source(key, partial(_documents, name, only_column(name, dataset, text_column), text_column))


def only_column(name: str, dataset: Any, column: str) -> Any:
    """A dataset without its other columns; a ValueError if it does not have this one."""
    columns = dataset.column_names
    if columns is None:  # a streamed dataset may not know them before it is read
        return dataset
    if column not in columns:
        raise missing_column(name, column, columns)
    return dataset.select_columns([column])


def _documents(name: str, dataset: Any, column: str) -> Iterator[Document]:
    number, batches = 0, dataset.iter(batch_size=_ROWS_AT_ONCE)
    while True:
        with read_errors(name):
            batch = next(batches, None)
        if batch is None:
            return
        for row, text in batch_rows(name, batch, column, number):
            yield row, [text]
        number += len(batch[column])


def batch_rows(name: str, batch: dict[str, list], column: str, first: int) -> Iterator[tuple[str, bytes]]:
    """Name and text of every row of a batch, which begins with row `first`; empty texts are included."""
    if column not in batch:
        raise missing_column(name, column, batch)
    for number, value in enumerate(batch[column], first):
        row = f"{name}, row {number}"
        yield row, column_bytes(value, column, row)


def is_dataset(source: Any) -> bool:
    """True for a dataset, or a dictionary of splits, of the `datasets` library."""
    datasets = sys.modules.get("datasets")  # an object of it exists only if it is loaded
    names = ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")
    return datasets is not None and isinstance(source, tuple(getattr(datasets, name) for name in names))


def dataset_name(dataset: Any) -> str:
    """The name of a given dataset or of its splits, for messages and cards."""
    dataset = next(iter(dataset.values()), dataset) if isinstance(dataset, dict) else dataset
    fingerprint = getattr(dataset, "_fingerprint", None)
    return dataset.info.dataset_name or (f"dataset {fingerprint}" if fingerprint else "streamed dataset")


def given_dataset(dataset: Any, options: ReadOptions) -> Source:
    """A dataset object, or the `split` of a dictionary of them."""
    name = dataset_name(dataset)
    if isinstance(dataset, dict):
        dataset = _choose_split(name, dataset, options.split)
    identity = None
    if (fingerprint := getattr(dataset, "_fingerprint", None)) is not None:
        identity = ["given", fingerprint]
        if dataset.format["type"] != "custom":  # values as Python has them; a transform is part of the content
            dataset = dataset.with_format(None)
    return _source(name, dataset, identity, options.text_column)


def _choose_split(name: str, splits: Any, split: str) -> Any:
    if split not in splits:
        raise ValueError(f"`split` is {split!r}; for {name} it must be one of {', '.join(map(repr, splits))}.")
    return splits[split]


def _import_datasets(purpose: str) -> Any:
    return import_optional("datasets", f"{purpose} needs the datasets package: pip install datasets")


def saved_dataset(path: Path, options: ReadOptions) -> Source:
    """A directory written by `save_to_disk`."""
    datasets = _import_datasets(f"reading {path}")
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many types for a damaged directory
        raise ValueError(f"{path} is not a whole saved dataset: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        dataset = _choose_split(str(path), dataset, options.split)
    return _source(str(path), dataset, [options.split, *map(file_stamp, files_below(path))], options.text_column)


def hub_dataset(name: str, options: ReadOptions) -> Source:
    """A dataset of the Hub, by its name."""
    dataset, identity = load_hub_dataset(name, options)
    return _source(f"dataset {name!r}", dataset, identity, options.text_column)


def load_hub_dataset(name: str, options: ReadOptions) -> tuple[Any, list]:
    """A dataset of the Hub, or of a folder with the same layout, and its identity as JSON."""
    if not name:
        raise ValueError("`source` is 'hub:'; it must be 'hub:owner/name'.")
    datasets = _import_datasets(f"reading the Hub dataset {name!r}")
    cached = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___"))
    if "/" in name and not Path(name).exists() and not cached.exists() and not datasets.config.HF_HUB_OFFLINE:
        try:
            check_repository(name, "dataset")
        except OSError as error:
            raise OSError(f"dataset {name!r} cannot be read: {error}") from error
    config_name, split, streaming = options.config_name, options.split, options.streaming
    try:
        dataset = datasets.load_dataset(name, config_name, split=split, streaming=streaming)
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"dataset {name!r} cannot be read: {error.__cause__ or error}") from error
    identity: list = [name, config_name, split, streaming]
    if not streaming:
        identity += [file_stamp(Path(file["filename"])) for file in dataset.cache_files]
    elif Path(name).is_dir():
        identity += [file_stamp(file) for file in files_below(Path(name))]
    return dataset, identity


def streamable(dataset: Any, split: str) -> Any:
    """A given `IterableDataset`, or the `split` of a dictionary of them; a ValueError for others."""
    name, datasets = dataset_name(dataset), _import_datasets("reading without packing")
    dataset = _choose_split(name, dataset, split) if isinstance(dataset, dict) else dataset
    if not isinstance(dataset, datasets.IterableDataset):
        raise ValueError(
            f"`source` is a {type(dataset).__name__}, {name!r}; to read it without packing, pass "
            "`dataset.to_iterable_dataset(num_shards=...)`."
        )
    return dataset


def stream_files(files: Sequence[Path]) -> Any:
    """JSONL or Parquet files as an `IterableDataset`, each file a shard."""
    formats = {}
    for file in files:
        plain = file.with_suffix("") if file.suffix in (".gz", ".zst") else file
        formats[_STREAMED_FORMATS.get(plain.suffix)] = file
    if None in formats or len(formats) > 1:
        found = " and ".join(sorted(file.name for file in formats.values()))
        raise ValueError(
            f"{found} cannot be streamed without packing; a source must be JSONL (.jsonl, .ndjson), Parquet, or a "
            "dataset (hub:NAME)."
        )
    (loader,) = formats
    datasets = _import_datasets("reading without packing")
    names = [str(file.absolute()) for file in files]
    with read_errors(names[0]):
        return datasets.load_dataset(loader, data_files=names, split="train", streaming=True)
