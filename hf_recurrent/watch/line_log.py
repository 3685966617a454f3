"""`LineLog`: a JSON line for every line of a log, in a file that a full disk does not make incomplete."""

import json
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

# Records that wait for room on the disk before reading pauses.
_MOST_WAITING = 10_000


class LineLog:
    """JSON lines that are appended to a file; those that cannot be written wait.

    Args:
        path: the file.
        mark: of the checkpoint that is continued; if it is of this file, what was written after it is removed, because
            the same lines follow again.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike, mark: Mapping[str, Any] | None = None):
        self.path = os.fspath(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        self._is_regular = os.path.isfile(path)
        if mark is not None and self._is_regular and mark["file"] == self._identity() and mark["size"] < self._size:
            os.ftruncate(self._descriptor, mark["size"])
            self._size = mark["size"]
        self._waiting: deque[bytes] = deque()

    def mark(self) -> dict[str, Any]:
        """JSON that says which file it is, and how much is written."""
        return {"file": self._identity(), "size": self._size}

    def _identity(self) -> list[int]:
        status = os.fstat(self._descriptor)
        return [status.st_dev, status.st_ino]

    @property
    def is_complete(self) -> bool:
        """True if no record waits."""
        return not self._waiting

    @property
    def is_full(self) -> bool:
        """True if so many records wait that no further line should be read."""
        return len(self._waiting) >= _MOST_WAITING

    def add(self, record: dict[str, Any]) -> None:
        """Add a record, and write those that wait.

        Raises:
            OSError: the disk is full, for example; the record waits.
        """
        self._waiting.append(json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the records that wait.

        Raises:
            OSError: they cannot be written; they go on waiting, and the file ends with a whole record.
        """
        while self._waiting:
            line = memoryview(self._waiting[0])
            written = 0
            try:
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except OSError:
                if written and self._is_regular:
                    os.ftruncate(self._descriptor, self._size)
                raise
            self._size += len(line)
            self._waiting.popleft()

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
