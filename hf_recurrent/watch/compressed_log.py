"""Logs that are read to their end: compressed files, and the rotated files of a log one after another."""

import bz2
import glob
import lzma
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_recurrent.data.decompression import COMPRESSIONS, check_installed, read_chunks
from hf_recurrent.watch.log_sources import LineBatch, LineSplitter, LogFile, LogSource, file_digest

ENDINGS = (*COMPRESSIONS, ".bz2", ".xz")
_CHUNK = 1 << 16
_ROTATED = re.compile(r"(?:\.(?P<number>\d{1,4})|[-.](?P<date>\d{8}(?:-?\d{2,6})?))(?:\.(?:gz|bz2|xz|zst))?")


def expand_logs(names: Sequence[str]) -> list[str]:
    """Files for names with `*`, `?` or `[`, sorted; other names as they are."""
    expanded: list[str] = []
    for name in names:
        files = [name]
        if name != "-" and glob.has_magic(name) and not os.path.exists(name):
            files = sorted(path for path in glob.glob(name) if os.path.isfile(path))
        if not files:
            raise ValueError(f"`LOG` is {name!r}, which no file matches.")
        expanded += files
    return expanded


def rotated_files(path: str | os.PathLike) -> list[str]:
    """The rotated files of a log, such as `LOG.2.gz`, `LOG.1` or `LOG-20240501`, oldest first."""
    path = Path(path)
    found = []
    for other in path.parent.glob(glob.escape(path.name) + "*") if path.parent.is_dir() else ():
        match = _ROTATED.fullmatch(other.name[len(path.name) :])
        if match is not None and other.is_file():
            order = (1, -int(match["number"])) if match["number"] else (0, int(match["date"].replace("-", "")))
            found.append((order, os.fspath(other)))
    return [name for _, name in sorted(found)]


def _chunks(path: str) -> Iterator[bytes]:
    """The decompressed bytes of a file."""
    if path.endswith(COMPRESSIONS):
        yield from read_chunks(Path(path))
        return
    with (bz2 if path.endswith(".bz2") else lzma).open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


class CompressedLog(LogSource):
    """Lines of a compressed file, from its beginning; offsets are of the decompressed bytes."""

    def __init__(self, path: str, max_line_bytes: int, position: Mapping[str, Any] | None = None):
        super().__init__(path, max_line_bytes)
        try:
            self._digest = file_digest(path)
        except OSError as error:
            raise OSError(f"The log {path!r} cannot be read: {error.strerror or error}.") from error
        check_installed(Path(path))
        self._chunks, self._to_skip = _chunks(path), 0
        if position is not None and position["digest"] == self._digest:
            self._to_skip = position["offset"]
            self._splitter = LineSplitter(max_line_bytes, position["offset"], position["line"])
        elif position is not None:
            self.notices.append(f"{path} is not the file that was read before; it is read from its beginning")

    def lag(self) -> int:
        return 0  # unknown

    def position(self) -> dict[str, Any]:
        return {"offset": self._splitter.offset, "line": self._splitter.number, "digest": self._digest}

    def beginning(self) -> str:
        return f"from line {self._splitter.number:,}"

    def _read(self) -> bool:
        if self.is_finished:
            return False
        try:
            chunk = next(self._chunks, b"")
        except (EOFError, OSError, ValueError, lzma.LZMAError) as error:
            self.notices.append(f"{self.name} is damaged, and its rest is not read: {str(error).rstrip('.')}")
            self.is_finished = True
            return False  # the line that the damage is in is not given
        if not chunk:
            self.is_finished = True
            return self._splitter.finish()
        skipped = min(self._to_skip, len(chunk))
        self._to_skip -= skipped
        self._splitter.feed(chunk[skipped:])
        return True


class RotatedLog(LogSource):
    """The rotated files of a log, oldest first, and then the log itself."""

    def __init__(
        self, path: str, max_line_bytes: int, *, follow: bool = True, position: Mapping[str, Any] | None = None
    ):
        super().__init__(os.fspath(path), max_line_bytes)
        self._follow, self._position = follow, None if position is None else position["position"]
        self._files = rotated_files(path)
        if position is not None:
            begin = position["file"]
            self._files = self._files[self._files.index(begin) :] if begin in self._files else []
        self._source = self._next()

    def _next(self) -> LogSource:
        position, self._position = self._position, None
        if not self._files:
            return LogFile(self.name, self.max_line_bytes, follow=self._follow, position=position)
        path = self._files.pop(0)
        if path.endswith(ENDINGS):
            return CompressedLog(path, self.max_line_bytes, position)
        return LogFile(path, self.max_line_bytes, follow=False, position=position)

    def read_lines(self, limit: int = 1024) -> LineBatch | None:
        while True:
            batch = self._source.read_lines(limit)
            self.notices += self._source.notices
            self._source.notices.clear()
            self.is_finished = self._source.is_finished and self._source.name == self.name
            if batch is not None or self.is_finished or not self._source.is_finished:
                return batch
            self._source = self._next()

    @property
    def next_number(self) -> int:
        return self._source.next_number

    def lag(self) -> int:
        return self._source.lag() + sum(os.path.getsize(path) for path in self._files if os.path.isfile(path))

    def position(self) -> dict[str, Any] | None:
        position = self._source.position()
        return None if position is None else {"file": self._source.name, "position": position}

    def beginning(self) -> str:
        return f"from {self._source.name}, {self._source.beginning()}"

    def _read(self) -> bool:
        return False  # `read_lines` reads the files
