"""Logs as lines of JSON. They say what happened, and nothing of what was written: no text, no token, no key."""

import json
import logging
import sys
import threading
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class RequestLog:
    """A line for each request, and for each message of the program, at the end of a file or on standard error."""

    def __init__(self, path: Path | None):
        self._file = sys.stderr if path is None else open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """Add a line; a disk that is full loses it."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event} | fields
        with self._lock, suppress(OSError, ValueError):
            self._file.write(f"{json.dumps(line)}\n")
            self._file.flush()

    def take_messages(self) -> None:
        """Write the warnings and errors of the process here."""
        handler = _Messages(self)
        handler.setLevel(logging.WARNING)
        for name in ("hf_recurrent", "uvicorn", "uvicorn.error"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [handler], False


class _Messages(logging.Handler):
    """Messages of `logging`. Those of exceptions are left out, because they may quote a request."""

    def __init__(self, log: RequestLog):
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = {"level": record.levelname.lower(), "logger": record.name}
        fields["message"] = record.msg if record.exc_info else record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            frames = traceback.extract_tb(record.exc_info[2])
            places = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
            fields |= {"error": record.exc_info[0].__name__, "at": places[-8:]}
        self._log.write("message", **fields)
