"""Documents, the sources that give them, and the files of a source.

A document is a pair (name, chunks). The name says where it is from, for error messages; the chunks are its bytes in
order, to be consumed before the next document is requested.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Document = tuple[str, Iterable[bytes]]


@dataclass(frozen=True)
class Source:
    """One part of a corpus.

    Args:
        key: names, sizes and times that determine the documents, as JSON; None if only reading them tells.
        documents: gives the documents, in an order that never changes.
        num_bytes: total length of the documents, if it is known before they are read.
    """

    key: list | None
    documents: Callable[[], Iterator[Document]]
    num_bytes: int | None = None


@dataclass(frozen=True)
class ReadOptions:
    """Options of `load_corpus` that choose and read documents; see there."""

    text_column: str = "text"
    split: str = "train"
    config_name: str | None = None
    streaming: bool = False
    binary: bool = False


def file_stamp(path: Path) -> list:
    """Name, size and modification time of a file, as JSON."""
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def files_below(directory: Path) -> list[Path]:
    """All files, sorted, without those whose name or directory begins with a dot."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(p.startswith(".") for p in path.relative_to(directory).parts))


def column_bytes(value: object, column: str, name: str) -> bytes:
    """One value of a text column as bytes; null is an empty document, which is skipped later."""
    if isinstance(value, str):
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: column {column!r} is not valid Unicode: {error}") from error
    if isinstance(value, bytes | None):
        return value or b""
    raise ValueError(f"{name}: column {column!r} holds {type(value).__name__}; it must hold text or bytes.")


def missing_column(name: str, column: str, columns: Iterable[str]) -> ValueError:
    present = ", ".join(map(repr, columns)) or "none"
    return ValueError(f"`text_column` is {column!r}; it must be a column of {name}, which has {present}.")
