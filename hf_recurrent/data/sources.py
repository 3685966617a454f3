"""Sources of `load_corpus`, resolved to parts that can be fingerprinted cheaply and then read."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hf_recurrent.data.dataset_sources import given_dataset, hub_dataset, is_dataset, saved_dataset
from hf_recurrent.data.decompression import check_installed
from hf_recurrent.data.file_stamps import file_stamp, files_below
from hf_recurrent.data.pixel_readers import pixel_files
from hf_recurrent.data.readers import Document, reader_of

HUB_PREFIX = "hub:"
_LARGEST_LIBRARY_FILE = 1 << 20


class Source(Protocol):
    """One part of a corpus."""

    def key(self) -> list | None:
        """Names, sizes and times that determine the documents, as JSON; None if only reading them tells."""

    def documents(self) -> Iterator[Document]:
        """The documents, in an order that never changes."""


@dataclass(frozen=True)
class FileSource:
    """A file whose format is that of its suffix."""

    path: Path
    text_column: str
    binary: bool

    def key(self) -> list:
        return ["file", *file_stamp(self.path), reader_of(self.path, self.binary).__name__]

    def documents(self) -> Iterator[Document]:
        return reader_of(self.path, self.binary)(self.path, self.text_column)


@dataclass(frozen=True)
class PixelSource:
    """A file of one or more images, each an episode."""

    path: Path
    read: Callable[[Path], Iterator[Document]]

    def key(self) -> list:
        return ["pixels", *file_stamp(self.path), self.read.__name__]

    def documents(self) -> Iterator[Document]:
        return self.read(self.path)


@dataclass(frozen=True)
class StandardLibrarySource:
    """A Python source file of the standard library.

    It is left out if it is not UTF-8, is very large, or holds byte 0, as some of the library's own test data do.
    """

    path: Path

    def key(self) -> list:
        return ["library", *file_stamp(self.path)]

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


def resolve(
    source: Any,
    *,
    text_column: str,
    split: str,
    config_name: str | None,
    streaming: bool,
    binary: bool,
) -> list[Source]:
    """The parts that `source` names or is, in an order that never changes. See `load_corpus`.

    Raises:
        ValueError: an empty list, a split or column that does not exist, or a damaged dataset.
        FileNotFoundError: no such file or directory.
        ImportError: an optional package is missing.
    """
    if is_dataset(source):
        return [given_dataset(source, split, text_column)]
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
        return [hub_dataset(name.removeprefix(HUB_PREFIX), config_name, split, streaming, text_column)]
    if (pixels := pixel_files(name, split)) is not None:
        return [PixelSource(file, pixels[0].read) for file in pixels[1]]
    path = Path(name).expanduser()
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return [saved_dataset(path, split, text_column)]
    files = _files(path, name)
    for file in files:  # before hours of reading others
        check_installed(file)
    return [FileSource(file, text_column, binary) for file in files]


def _files(path: Path, name: str) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        files = files_below(path)
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


def _standard_library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    third_party = {"site-packages", "dist-packages", "__pycache__"}
    paths = sorted(path for path in root.rglob("*.py") if not third_party.intersection(path.relative_to(root).parts))
    if not paths:
        raise FileNotFoundError(f"`source` is 'python', but {root} holds no source files of the standard library.")
    return [StandardLibrarySource(path) for path in paths]
