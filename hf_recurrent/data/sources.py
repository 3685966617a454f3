"""Sources of `load_corpus`, resolved to parts that can be fingerprinted cheaply and then read."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hf_recurrent.data.dataset_sources import given_dataset, hub_dataset, is_dataset, saved_dataset
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.data.file_stamps import file_stamp, files_below
from hf_recurrent.data.pixel_images import import_pillow
from hf_recurrent.data.pixel_readers import PIXEL_FORMATS, pixel_files
from hf_recurrent.data.readers import Document, check_packages, is_plain, reader_of
from hf_recurrent.own_parts import OwnParts, hint_for_unknown

HUB_PREFIX = "hub:"
_IMAGES_PREFIX = "images:"  # the pixel format whose files Pillow reads
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


@dataclass(frozen=True)
class OwnSource:
    """A registered function, called with the text after the colon."""

    name: str
    read: Callable[[str], Iterable[str | bytes]]

    def key(self) -> None:
        return None

    def documents(self) -> Iterator[Document]:
        """The documents of the function, as UTF-8 where it gives text.

        Raises:
            ValueError: it gives something else, or fails.
        """
        try:
            for number, document in enumerate(self.read(self.name.partition(":")[2])):
                if isinstance(document, str):
                    document = document.encode()
                if not isinstance(document, bytes):
                    raise TypeError(f"document {number} is of type {type(document).__name__}; it must be str or bytes")
                yield f"{self.name}, document {number}", [document]
        except Exception as error:  # of the user's code, which may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"`source` is {self.name!r}; `{self.read.__name__}` failed: {reason}.") from error


_Part = TypeVar("_Part", bound=Callable)


def _check_source(name: str, part: Any) -> None:
    if not callable(part) or (isinstance(part, type) and not _is_episode_source(part)):
        raise ValueError(
            f"The source {name!r} is {part!r}; it must be a function that gives documents, or a subclass of "
            "`EpisodeSource`."
        )


def _is_episode_source(part: Any) -> bool:
    return isinstance(part, type) and EpisodeSource in part.__mro__


_BUILT_IN = ("python", "task", *(prefix.rstrip(":") for prefix in (HUB_PREFIX, *PIXEL_FORMATS)))
_OWN_SOURCES = OwnParts("source", _BUILT_IN, _check_source)


def register_source(name: str) -> Callable[[_Part], _Part]:
    """Decorator that makes data of your own available as `NAME:TEXT`, in [`load_corpus`] and for `--corpus`.

    It decorates either of these, which is called with the text after the colon:

    * a function that returns or yields documents, each an episode as str or bytes, in an order that never changes.
      They are read at every start, to see whether they have changed, and packed once;
    * a subclass of [`EpisodeSource`], for `--corpus` only.

    Args:
        name: a name that no source of this package has.

    Raises:
        ValueError: it decorates something else, or the name is taken by other code.
    """

    def register(part: _Part) -> _Part:
        _OWN_SOURCES.add(name, part)
        return part

    return register


def own_episode_source(name: str) -> EpisodeSource | None:
    """The registered [`EpisodeSource`] of `NAME:TEXT`; None for other names."""
    prefix, _, text = name.partition(":")
    part = _OWN_SOURCES.get(prefix)
    return part(text) if ":" in name and _is_episode_source(part) else None


def _own_documents(name: str) -> OwnSource | None:
    part = _OWN_SOURCES.get(name.partition(":")[0]) if ":" in name else None
    if _is_episode_source(part):
        raise ValueError(f"`source` is {name!r}, an `EpisodeSource`, which cannot be combined or read as a corpus.")
    return None if part is None else OwnSource(name, part)


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
    if (own := _own_documents(name)) is not None:
        return [own]
    if (pixels := pixel_files(name, split)) is not None:
        if name.startswith(_IMAGES_PREFIX):
            import_pillow(f"reading {name}")
        return [PixelSource(file, pixels[0].read) for file in pixels[1]]
    path = Path(name).expanduser()
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return [saved_dataset(path, split, text_column)]
    files = _files(path, name)
    for file in files:  # before hours of reading others
        check_packages(file)
    return [FileSource(file, text_column, binary) for file in files]


def plain_bytes(parts: Iterable[Source]) -> int | None:
    """Total length of the documents of `parts`; None unless all are files that are read as they are."""
    files = [part.path if isinstance(part, FileSource) and is_plain(part.path) else None for part in parts]
    return None if None in files else sum(file.stat().st_size for file in files)


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
        prefix, colon, _ = name.partition(":")
        hint = ""
        if colon and prefix.isidentifier() and len(prefix) > 1:
            hint = f" Of {prefix + colon!r}: {hint_for_unknown(prefix, [*_OWN_SOURCES, *_BUILT_IN], 'a source')}"
        raise FileNotFoundError(
            f"`source` is {name!r}, which does not exist; it must be 'python', a path or a glob pattern of files, a "
            f"directory, 'hub:owner/name' for a dataset of the Hub, 'mnist:FOLDER' or 'images:FOLDER'.{hint}"
        )
    return files


def _standard_library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    third_party = {"site-packages", "dist-packages", "__pycache__"}
    paths = sorted(path for path in root.rglob("*.py") if not third_party.intersection(path.relative_to(root).parts))
    if not paths:
        raise FileNotFoundError(f"`source` is 'python', but {root} holds no source files of the standard library.")
    return [StandardLibrarySource(path) for path in paths]
