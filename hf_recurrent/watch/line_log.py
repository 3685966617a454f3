"""`LineLog`: a JSON line for every line of a log; records wait in memory while the disk is full."""

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from hf_recurrent.online.line_file import LineFile
from hf_recurrent.watch.log_lines import LogLine
from hf_recurrent.watch.log_watcher import LineReport

# Waiting records at which reading pauses.
_MOST_WAITING = 10_000


class LineLog:
    """JSON lines that are appended to a file; records that cannot be written wait.

    Args:
        path: the file.
        mark: of the checkpoint that is continued; if it is of this file, later lines are removed, because they are
            written again.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike, mark: Mapping[str, Any] | None = None):
        self._file = LineFile(path)
        own = self.mark()
        if mark is not None and self._file.is_regular and mark["file"] == own["file"] and mark["size"] < own["size"]:
            self._file.truncate(mark["size"])
        self._waiting: deque[bytes] = deque()

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
        return len(self._waiting) >= _MOST_WAITING

    def add(self, record: dict[str, Any]) -> None:
        """Add a record, and [`flush`]."""
        self._waiting.append(json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the records that wait.

        Raises:
            OSError: the disk is full, for example; the rest of the records waits, and the file ends with a whole one.
        """
        while self._waiting:
            self._file.append(self._waiting[0])
            self._waiting.popleft()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def line_record(name: str, line: LogLine, content: bytes, report: LineReport) -> dict[str, Any]:
    """The JSON of a line."""
    record = {
        "log": name,
        "line_number": line.number,
        "offset": line.offset,
        "bits": _finite(float(report.bits.sum())),
        "bits_per_byte": _finite(float(report.bits.mean())),
        "score": _finite(report.score),
        "threshold": _finite(report.threshold),
        "unusual": report.is_unusual,
        "rarity": _finite(report.rarity),
        "reason": report.reason,
        "surprising": report.surprising(),
        "text": content.decode("utf-8", "replace"),
    }
    if line.length > len(line.content):
        record["length"] = line.length
    return record


def _finite(value: float) -> float | None:
    """The value for JSON, which has no infinity."""
    return round(value, 3) if math.isfinite(value) else None
