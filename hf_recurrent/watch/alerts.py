"""`AlertCommand`: a shell command for every unusual line, run in a thread so that reading continues."""

import json
import os
import queue
import subprocess
import threading
from typing import Any

_MOST_WAITING = 1000
_LONGEST_OUTPUT = 300


class AlertCommand:
    """Runs a shell command for each record, one after another, in a thread.

    The command gets the record as JSON on standard input, and in `WATCH_` variables of its environment. No text of the
    log becomes part of the command line.

    Args:
        command: for `/bin/sh -c`.
        seconds: time after which a command is killed.

    Attributes:
        failures: commands that failed, and alerts that were dropped because too many were waiting.
        notices: messages about them, each once; the caller shows them and clears the list.
    """

    def __init__(self, command: str, seconds: float = 60.0):
        self.command, self.failures = command, 0
        self.notices: list[str] = []
        self._seconds = seconds
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run_all, daemon=True)
        self._thread.start()

    def send(self, record: dict[str, Any]) -> None:
        """Queue a record."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._note(f"{_MOST_WAITING:,} alerts wait for --exec; further ones are dropped")

    def _note(self, failure: str) -> None:
        self.failures += 1
        if failure not in self.notices:
            self.notices.append(failure)

    def close(self, seconds: float = 10.0) -> None:
        """Wait for the queued commands, at most `seconds`."""
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _run_all(self) -> None:
        while (record := self._queue.get()) is not None:
            if problem := self._run(record):
                self._note(f"--exec {problem}")

    def _run(self, record: dict[str, Any]) -> str | None:
        """Run the command; returns an error message or None."""
        variables = {
            f"WATCH_{name.upper()}": _plain(value)
            for name, value in record.items()
            if isinstance(value, str | int | float)
        }
        try:
            result = subprocess.run(
                ["/bin/sh", "-c", self.command],
                input=json.dumps(record).encode() + b"\n",
                env={**os.environ, **variables},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=self._seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"took more than {self._seconds:g} seconds and was stopped"
        except OSError as error:
            return f"cannot be run: {error.strerror}"
        if result.returncode:
            said = " ".join(result.stderr.decode(errors="replace").split())[:_LONGEST_OUTPUT]
            return f"ended with status {result.returncode}{f': {said}' if said else ''}"
        return None


def _plain(value: str | int | float) -> str:
    """The value of an environment variable, which cannot hold a byte 0; the system limits it to 128 kB."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:4096]
