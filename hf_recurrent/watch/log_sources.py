"""Sources of log lines, in batches and in constant memory: files that grow and are rotated, and standard input.

A source does not block and, once opened, does not raise for events such as rotation, but adds a message to
`notices`.
"""

import hashlib
import os
import select
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_recurrent.online.sources import file_change, has_before, read_at

_CHUNK = 1 << 16
# Bytes before the position by which a file is recognized.
_COMPARED = 1 << 10
# Seconds before a renamed file is closed: its writer may not have noticed yet.
_PATIENCE = 1.0
# Seconds between two attempts to read a file that has no new bytes.
_BETWEEN_LOOKS = 0.1


@dataclass(slots=True)
class LineBatch:
    r"""Consecutive lines of one file.

    Args:
        contents: the lines without their line ends (`\n` or `\r\n`), cut to the limit of the splitter.
        number, offset: of the first line in its file, from 1, and in bytes.
        lengths: bytes of each line in the file, with its line end.
        cut: index of each line that was cut → its bytes, without the line end.
    """

    contents: list[bytes]
    number: int
    offset: int
    lengths: list[int]
    cut: dict[int, int]


class LineSplitter:
    """Cuts chunks of bytes into lines, of which the first `max_bytes` are kept; further ones are only counted.

    Attributes:
        offset, number: of the first line in the file that was not taken yet.
    """

    def __init__(self, max_bytes: int, offset: int = 0, number: int = 1):
        self.offset, self.number = offset, number
        self._max_bytes = max_bytes
        # Complete lines, as in a batch.
        self._contents: list[bytes] = []
        self._lengths: list[int] = []
        self._cut: dict[int, int] = {}
        # The line whose end is not there yet. A byte more is kept, because it may belong to the line end.
        self._kept, self._length, self._ends_in_return = bytearray(), 0, False

    def feed(self, chunk: bytes) -> None:
        pieces = chunk.split(b"\n")
        rest = pieces.pop()
        if pieces and self._length:
            self._hold(pieces.pop(0))
            self._end_line(1)
        if pieces:
            self._add(pieces, b"\r\n" in chunk)
        if rest:
            self._hold(rest)

    def finish(self) -> bool:
        """Complete the line whose end is not there; False if there is none."""
        if not self._length:
            return False
        self._end_line(0)
        return True

    def take(self, limit: int) -> LineBatch | None:
        """The next complete lines, at most `limit`; None if there are none."""
        if not self._contents:
            return None
        contents, lengths = self._contents[:limit], self._lengths[:limit]
        cut = {index: length for index, length in self._cut.items() if index < limit}
        batch = LineBatch(contents, self.number, self.offset, lengths, cut)
        del self._contents[:limit], self._lengths[:limit]
        self._cut = {index - limit: length for index, length in self._cut.items() if index >= limit}
        self.offset, self.number = self.offset + sum(lengths), self.number + len(contents)
        return batch

    def _add(self, lines: list[bytes], has_returns: bool) -> None:
        """Add whole lines without their `\n`; for usual lines, no Python code runs per line but the `+ 1`."""
        lengths = [length + 1 for length in map(len, lines)]
        if has_returns:
            lines = [line.removesuffix(b"\r") for line in lines]
        if max(lengths) > self._max_bytes:  # perhaps
            for index, line in enumerate(lines):
                if len(line) > self._max_bytes:
                    self._cut[len(self._contents) + index] = len(line)
                    lines[index] = line[: self._max_bytes]
        self._contents += lines
        self._lengths += lengths

    def _hold(self, piece: bytes) -> None:
        room = self._max_bytes + 1 - len(self._kept)
        if room > 0:
            self._kept += piece[:room]
        self._length += len(piece)
        if piece:
            self._ends_in_return = piece.endswith(b"\r")

    def _end_line(self, end_bytes: int) -> None:
        length = self._length - self._ends_in_return
        if length > self._max_bytes:
            self._cut[len(self._contents)] = length
        self._contents.append(bytes(self._kept[: min(length, self._max_bytes)]))
        self._lengths.append(self._length + end_bytes)
        self._kept, self._length, self._ends_in_return = bytearray(), 0, False


class LogSource(ABC):
    """Lines of one log, of which the first `max_line_bytes` are kept.

    Attributes:
        is_finished: there will be no further line.
        notices: messages about the log; the caller shows them and clears the list.
    """

    def __init__(self, name: str, max_line_bytes: int):
        self.name, self.max_line_bytes = name, max_line_bytes
        self.is_finished = False
        self.notices: list[str] = []
        self._splitter = LineSplitter(max_line_bytes)

    def read_lines(self, limit: int = 1024) -> LineBatch | None:
        """The next lines, at most `limit`; None if there is none at the moment."""
        while (batch := self._splitter.take(limit)) is None and self._read():
            pass
        return batch

    @property
    def next_number(self) -> int:
        return self._splitter.number

    @abstractmethod
    def _read(self) -> bool:
        """Feed or finish the splitter, whose lines were all taken; False if there is nothing at the moment."""

    @abstractmethod
    def lag(self) -> int:
        """Bytes that have arrived after the line that was given last."""

    def position(self) -> dict[str, Any] | None:
        """JSON to continue after the line that was given last; None if the source cannot be continued."""
        return None

    def beginning(self) -> str:
        """The position of the first line, in words."""
        return "from the first line that arrives"


class StandardInput(LogSource):
    def __init__(self, max_line_bytes: int):
        super().__init__("standard input", max_line_bytes)
        if sys.stdin is None:
            raise OSError("The source is '-', but standard input is closed.")
        self._descriptor = sys.stdin.fileno()
        self._received = 0

    def lag(self) -> int:
        return self._received - self._splitter.offset  # in the pipe itself, at most 64 kB wait

    def _read(self) -> bool:
        # On Windows, select() takes sockets only: there, reading blocks.
        if self.is_finished or (os.name == "posix" and not select.select([self._descriptor], [], [], 0)[0]):
            return False
        chunk = os.read(self._descriptor, _CHUNK)
        if not chunk:
            self.is_finished = True
            return self._splitter.finish()
        self._received += len(chunk)
        self._splitter.feed(chunk)
        return True


class LogFile(LogSource):
    """Lines of a file, followed by name like `tail -F`: it may be rotated, truncated, removed and created again.

    Args:
        path: the file, which need not exist yet if it is followed.
        follow: wait for more at the end of the file.
        history: start this many bytes before the end of the file; None for its beginning.
        position: of [`position`], to continue there. If the file was rotated since, the old file is finished first.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        max_line_bytes: int,
        *,
        follow: bool = True,
        history: int | None = None,
        position: Mapping[str, Any] | None = None,
    ):
        super().__init__(os.fspath(path), max_line_bytes)
        self._path, self._follow, self._history = Path(path), follow, history
        self._file: Any = None
        self._next_look = 0.0
        self._replaced_since: float | None = None
        self._problem: str | None = None
        if position is not None:
            self._continue(position)
        elif not follow or self._path.exists():
            self._open(self._path, must_exist=not follow)

    def lag(self) -> int:
        if self._file is None:
            return 0
        return max(os.fstat(self._file.fileno()).st_size - self._splitter.offset, 0)

    def position(self) -> dict[str, Any] | None:
        if self._file is None:
            return None
        offset = self._splitter.offset
        return {"offset": offset, "line": self._splitter.number, "digest": _digest(self._file, offset)}

    def beginning(self) -> str:
        if self._file is None:
            return "which does not exist yet"
        return f"from line {self._splitter.number:,}, {self.lag():,} bytes before its end"

    # ---- Opening ----

    def _open(self, path: Path, offset: int | None = None, number: int = 1, must_exist: bool = False) -> bool:
        """Open a file at an offset, by default at the beginning of its history; False if it cannot be opened."""
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115 (kept open)
            if not os.path.isfile(path):
                file.close()
                raise OSError(None, "it is not a regular file")
            if offset is None:
                offset, number = _beginning(file, self._history)
        except OSError as error:
            if must_exist:
                raise OSError(f"The log {self.name!r} cannot be read: {error.strerror or error}.") from error
            self._report(f"{self.name} cannot be read: {(error.strerror or str(error)).lower()}; waiting for it")
            return False
        if self._file is not None:
            self._file.close()
        self._file, self._history, self._replaced_since, self._problem = file, None, None, None
        self._begin_at(offset, number)
        return True

    def _begin_at(self, offset: int, number: int) -> None:
        self._before = read_at(self._file, max(offset - _COMPARED, 0), min(offset, _COMPARED))
        self._file.seek(offset)
        self._read_to = offset
        self._splitter = LineSplitter(self.max_line_bytes, offset, number)

    def _continue(self, position: Mapping[str, Any]) -> None:
        """Open the file of a saved position, which may have been renamed in its directory."""
        self._history = None
        candidates = [self._path]
        if self._path.parent.is_dir():
            candidates += sorted(path for path in self._path.parent.iterdir() if path.name.startswith(self._path.name))
        for path in candidates:
            if _is_at(path, position):
                self._open(path, position["offset"], position["line"])
                if path != self._path:
                    self.notices.append(f"{self.name} was rotated meanwhile; {path} is read to its end first")
                return
        if self._path.exists():
            self.notices.append(
                f"{self.name} is not the file that was read before, which is gone or was changed; its lines after "
                f"byte {position['offset']:,} may be missing. This file is read from its beginning"
            )
            self._open(self._path)

    # ---- Reading ----

    def _read(self) -> bool:
        now = time.monotonic()
        if self.is_finished or now < self._next_look:
            return False
        try:
            has_read = self._wait_for_file() if self._file is None else self._read_more(now)
        except OSError as error:
            self._report(f"{self.name} cannot be read: {(error.strerror or str(error)).lower()}; trying again")
            has_read = False
        if not has_read:
            self._next_look = now + _BETWEEN_LOOKS
        return has_read

    def _wait_for_file(self) -> bool:
        if self._path.exists():
            return self._open(self._path)
        if self._problem is None:
            self._report(f"{self.name} does not exist; waiting for it")
        return False

    def _read_more(self, now: float) -> bool:
        if not has_before(self._file, self._read_to, self._before):  # truncated; it may have grown again
            if not self._splitter.finish():  # else after that line was taken
                self._begin_at(0, 1)
                self.notices.append(
                    f"{self.name} was truncated; lines that were not read yet are lost. Reading from its beginning"
                )
            return True
        chunk = self._file.read(_CHUNK)
        if chunk:
            self._read_to += len(chunk)
            self._before = (self._before + chunk)[-_COMPARED:]
            self._splitter.feed(chunk)
            return True
        if self._follow:
            return self._open_if_replaced(now)
        self.is_finished = True
        return self._splitter.finish()

    def _open_if_replaced(self, now: float) -> bool:
        """Open the new file if the file was renamed, once nothing more is added to the old one."""
        change = file_change(self._path, self._file)
        if change == "removed":  # or between the two steps of a rotation
            self._report(f"{self.name} was removed; waiting for a new one")
        if change != "replaced":
            self._replaced_since = None
            return False
        self._replaced_since = self._replaced_since or now
        if now - self._replaced_since < _PATIENCE:
            return False
        if self._splitter.finish():
            return True
        is_open = self._open(self._path, 0, 1)
        if is_open:
            self.notices.append(f"{self.name} was rotated; reading the new file")
        return is_open

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self.notices.append(problem)


def _digest(file: Any, offset: int) -> str:
    """Hash of the first bytes of a file and the bytes before an offset."""
    count = min(offset, _COMPARED)
    return hashlib.sha256(read_at(file, 0, count) + read_at(file, offset - count, count)).hexdigest()


def file_digest(path: str | os.PathLike) -> str:
    """Hash of the first bytes of a file."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.sha256(read_at(file, 0, _COMPARED)).hexdigest()


def _is_at(path: Path, position: Mapping[str, Any]) -> bool:
    """True if the bytes of a file before a saved position are the same as then."""
    try:
        with open(path, "rb", buffering=0) as file:
            offset = position["offset"]
            return os.fstat(file.fileno()).st_size >= offset and _digest(file, offset) == position["digest"]
    except OSError:
        return False


def _beginning(file: Any, history: int | None) -> tuple[int, int]:
    """Offset and number of the first line at most `history` bytes before the end of a file."""
    size = os.fstat(file.fileno()).st_size
    if history is None or size <= history:
        return 0, 1
    wanted = size - history
    read, number, offset = 0, 1, 0
    while read < wanted and (chunk := file.read(min(_CHUNK, wanted - read))):
        if (end := chunk.rfind(b"\n")) >= 0:
            offset = read + end + 1
        number, read = number + chunk.count(b"\n"), read + len(chunk)
    return offset, number
