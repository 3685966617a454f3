"""`RecordFile`: JSON lines that are appended to a file; they wait in memory while the disk is full."""

import os
from collections import deque
from collections.abc import Mapping
from json.encoder import encode_basestring  # type: ignore[attr-defined]
from typing import Any

from hf_recurrent.online.line_file import LineFile

# Waiting bytes at which reading pauses.
_MOST_WAITING = 8 << 20


class RecordFile:
    """JSON lines that are appended to a file; records that cannot be written wait.

    Args:
        path: the file.
        mark: of the checkpoint that is continued; if it is of this file, later lines are removed, because they are
            written again.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike, mark: Mapping[str, Any] | None = None):
        self.path = path
        self._file = LineFile(path)
        own = self.mark()
        if mark is not None and self._file.is_regular and mark["file"] == own["file"] and mark["size"] < own["size"]:
            self._file.truncate(mark["size"])
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def mark(self) -> dict[str, Any]:
        """JSON with the identity of the file and its size."""
        status = self._file.status()
        return {"file": [status.st_dev, status.st_ino], "size": status.st_size}

    @property
    def is_complete(self) -> bool:
        """True if no record waits."""
        return not self._waiting

    @property
    def is_full(self) -> bool:
        """True if too many records wait to read further lines."""
        return self._waiting_bytes >= _MOST_WAITING

    def add(self, records: bytes) -> None:
        """Add whole JSON lines, and [`flush`]."""
        if records:
            self._waiting.append(records)
            self._waiting_bytes += len(records)
        self.flush()

    def flush(self) -> None:
        """Write the records that wait.

        Raises:
            OSError: the disk is full, for example; the rest of the records waits, and the file ends with a whole one.
        """
        while self._waiting:
            self._file.append(self._waiting[0])
            self._waiting_bytes -= len(self._waiting.popleft())

    def close(self) -> None:
        self._file.close()


def json_text(text: bytes) -> str:
    """Bytes as a JSON string; what is not UTF-8 becomes a replacement character."""
    return encode_basestring(text.decode("utf-8", "replace"))
