"""Sources of `load_corpus`, resolved to parts that can be fingerprinted cheaply and then read."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hf_recurrent.data.pixel_readers import pixel_files
from hf_recurrent.data.readers import Document, column_bytes, missing_column, reader_of

HUB_PREFIX = "hub:"
_LARGEST_LIBRARY_FILE = 1 << 20
_ROWS_AT_ONCE = 256


class Source(Protocol):
    """One part of a corpus."""

    def key(self) -> list:
        """Names, sizes and times that determine the documents, as JSON."""

    def documents(self) -> Iterator[Document]:
        """The documents, in an order that never changes."""


@dataclass(frozen=True)
class FileSource:
    """A file whose format is that of its suffix."""

    path: Path
    text_column: str
    binary: bool

    def key(self) -> list:
        return ["file", *_stamp(self.path), reader_of(self.path, self.binary).__name__]

    def documents(self) -> Iterator[Document]:
        return reader_of(self.path, self.binary)(self.path, self.text_column)


@dataclass(frozen=True)
class PixelSource:
    """A file of one or more images, each an episode."""

    path: Path
    read: Callable[[Path], Iterator[Document]]

    def key(self) -> list:
        return ["pixels", *_stamp(self.path), self.read.__name__]

    def documents(self) -> Iterator[Document]:
        return self.read(self.path)


@dataclass(frozen=True)
class StandardLibrarySource:
    """A Python source file of the standard library.

    It is left out if it is not UTF-8, is very large, or holds byte 0, as some of the library's own test data do.
    """

    path: Path

    def key(self) -> list:
        return ["library", *_stamp(self.path)]

    def documents(self) -> Iterator[Document]:
        if self.path.stat().st_size > _LARGEST_LIBRARY_FILE:
            return
        data = self.path.read_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            return
        if b"\0" not in data:
            yield str(self.path), [data]


class DatasetSource:
    """A split of a dataset of the `datasets` library.

    Args:
        name: its name in error messages.
        dataset: a `Dataset` or an `IterableDataset`.
        identity: JSON that differs from that of every other dataset.
        text_column: the column with the documents.
    """

    def __init__(self, name: str, dataset: Any, identity: list, text_column: str) -> None:
        self._name, self._dataset, self._identity, self._text_column = name, dataset, identity, text_column
        columns = dataset.column_names  # None if a streamed dataset does not know them before it is read
        if columns is not None and text_column not in columns:
            raise missing_column(name, text_column, columns)

    def key(self) -> list:
        return ["dataset", self._identity, self._text_column]

    def documents(self) -> Iterator[Document]:
        column, dataset = self._text_column, self._dataset
        if dataset.column_names is not None:
            dataset = dataset.select_columns([column])
        number = 0
        for rows in self._batches(dataset):
            if column not in rows:
                raise missing_column(self._name, column, rows)
            for value in rows[column]:
                name = f"{self._name}, row {number}"
                yield name, [column_bytes(value, column, name)]
                number += 1

    def _batches(self, dataset: Any) -> Iterator[dict[str, list]]:
        import pyarrow

        try:
            yield from dataset.iter(batch_size=_ROWS_AT_ONCE)
        except (pyarrow.ArrowException, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"{self._name} cannot be read: {error}") from error


def resolve(
    source: str | os.PathLike | Iterable[str | os.PathLike],
    *,
    text_column: str,
    split: str,
    config_name: str | None,
    streaming: bool,
    binary: bool,
) -> list[Source]:
    """The parts that `source` names, in an order that never changes. See `load_corpus`.

    Raises:
        ValueError: an empty list, a split or column that does not exist, or a damaged dataset.
        FileNotFoundError: no such file or directory.
        ImportError: an optional package is missing.
    """
    if not isinstance(source, str | os.PathLike):
        parts = [
            part
            for each in source
            for part in resolve(
                each,
                text_column=text_column,
                split=split,
                config_name=config_name,
                streaming=streaming,
                binary=binary,
            )
        ]
        if not parts:
            raise ValueError("`source` is an empty list; it must name at least one file or dataset.")
        return parts
    name = os.fspath(source)
    if name == "python":
        return _standard_library()
    if name.startswith(HUB_PREFIX):
        return [_hub_dataset(name.removeprefix(HUB_PREFIX), config_name, split, streaming, text_column)]
    if (pixels := pixel_files(name, split)) is not None:
        return [PixelSource(file, pixels[0].read) for file in pixels[1]]
    path = Path(name).expanduser()
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return [_saved_dataset(path, split, text_column)]
    return [FileSource(file, text_column, binary) for file in _files(path, name)]


def _stamp(path: Path) -> list:
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def _files(path: Path, name: str) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        files = _files_below(path)
        if not files:
            raise FileNotFoundError(f"`source` is {name!r}, a directory without files.")
        return files
    files = sorted(found for found in map(Path, glob.glob(str(path), recursive=True)) if found.is_file())
    if not files:
        raise FileNotFoundError(
            f"`source` is {name!r}, which does not exist; it must be 'python', a path or a glob pattern of files, a "
            "directory, 'hub:owner/name' for a dataset of the Hub, 'mnist:FOLDER' or 'images:FOLDER'."
        )
    return files


def _files_below(directory: Path) -> list[Path]:
    """All files, sorted, without those whose name or directory begins with a dot."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(p.startswith(".") for p in path.relative_to(directory).parts))


def _standard_library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    third_party = {"site-packages", "dist-packages", "__pycache__"}
    paths = sorted(path for path in root.rglob("*.py") if not third_party.intersection(path.relative_to(root).parts))
    if not paths:
        raise FileNotFoundError(f"`source` is 'python', but {root} holds no source files of the standard library.")
    return [StandardLibrarySource(path) for path in paths]


def _import_datasets(purpose: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{purpose} needs the datasets package: pip install datasets") from error
    return datasets


def _saved_dataset(path: Path, split: str, text_column: str) -> DatasetSource:
    datasets = _import_datasets(f"reading {path}")
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many types for a damaged directory
        raise ValueError(f"{path} is not a whole saved dataset: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise ValueError(f"`split` is {split!r}; for {path} it must be one of {', '.join(map(repr, dataset))}.")
        dataset = dataset[split]
    return DatasetSource(str(path), dataset, [split, *map(_stamp, _files_below(path))], text_column)


def _hub_dataset(name: str, config_name: str | None, split: str, streaming: bool, text_column: str) -> DatasetSource:
    if not name:
        raise ValueError(f"`source` is {HUB_PREFIX!r}; it must be 'hub:owner/name'.")
    datasets = _import_datasets(f"reading the Hub dataset {name!r}")
    try:
        dataset = datasets.load_dataset(name, config_name, split=split, streaming=streaming)
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(f"dataset {name!r} cannot be read: {error.__cause__ or error}") from error
    identity: list = [name, config_name, split, streaming]
    if not streaming:
        identity += [_stamp(Path(file["filename"])) for file in dataset.cache_files]
    elif Path(name).is_dir():
        identity += [_stamp(file) for file in _files_below(Path(name))]
    return DatasetSource(f"dataset {name!r}", dataset, identity, text_column)
