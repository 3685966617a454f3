"""Sources of `load_corpus`, resolved to parts that can be fingerprinted cheaply and then read."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hf_recurrent.argument_checks import expand_home
from hf_recurrent.data.dataset_sources import given_dataset, hub_dataset, is_dataset, saved_dataset
from hf_recurrent.data.documents import Document, ReadOptions, Source, file_stamp, files_below
from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.data.pixel_readers import PIXEL_FORMATS, pixel_sources
from hf_recurrent.data.readers import check_packages, is_plain, reader_of
from hf_recurrent.own_parts import OwnParts, hint_for_unknown

HUB_PREFIX = "hub:"
_LARGEST_LIBRARY_FILE = 1 << 20

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


def resolve(source: Any, options: ReadOptions) -> list[Source]:
    """The parts that `source` names or is, in an order that never changes. See `load_corpus`."""
    if is_dataset(source):
        return [given_dataset(source, options)]
    if not isinstance(source, str | os.PathLike):
        parts = [part for each in source for part in resolve(each, options)]
        if not parts:
            raise ValueError("`source` is an empty list; it must name at least one file or dataset.")
        return parts
    name = os.fspath(source)
    if name == "python":
        return _standard_library()
    if name.startswith(HUB_PREFIX):
        return [hub_dataset(name.removeprefix(HUB_PREFIX), options)]
    if (own := _OWN_SOURCES.get(name.partition(":")[0])) is not None and ":" in name:
        if _is_episode_source(own):
            raise ValueError(
                f"`source` is {name!r}, an `EpisodeSource`, which cannot be combined or read as a corpus."
            )
        return [Source(None, partial(_own_documents, name, own))]
    if (pixels := pixel_sources(name, options.split)) is not None:
        return pixels
    path = expand_home(name)
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return [saved_dataset(path, options)]
    files = list_files(path, name)
    for file in files:  # before hours of reading others
        check_packages(file)
    return [_file(file, options) for file in files]


def known_bytes(parts: Iterable[Source]) -> int | None:
    """Total length of the documents of `parts`; None if it is not known before they are read."""
    sizes = [part.num_bytes for part in parts]
    return None if None in sizes else sum(sizes)


def _file(path: Path, options: ReadOptions) -> Source:
    reader = reader_of(path, options.binary)
    num_bytes = path.stat().st_size if is_plain(path) else None
    return Source(["file", *file_stamp(path), reader.__name__], partial(reader, path, options.text_column), num_bytes)


def list_files(path: Path, name: str) -> list[Path]:
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
    return [Source(["library", *file_stamp(path)], partial(_library_file, path)) for path in paths]


def _library_file(path: Path) -> Iterator[Document]:
    """A file that is not UTF-8, is very large, or holds byte 0, like some of the library's test data, is left out."""
    if path.stat().st_size > _LARGEST_LIBRARY_FILE:
        return
    data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return
    if b"\0" not in data:
        yield str(path), [data]


def _own_documents(name: str, read: Callable[[str], Iterable[str | bytes]]) -> Iterator[Document]:
    """The documents of a registered function, which is called with the text after the colon."""
    try:
        for number, document in enumerate(read(name.partition(":")[2])):
            if isinstance(document, str):
                document = document.encode()
            if not isinstance(document, bytes):
                raise TypeError(f"document {number} is of type {type(document).__name__}; it must be str or bytes")
            yield f"{name}, document {number}", [document]
    except Exception as error:  # of the user's code, which may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"`source` is {name!r}; `{read.__name__}` failed: {reason}.") from error
