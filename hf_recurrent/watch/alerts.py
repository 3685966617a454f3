"""Alerts: a shell command or a webhook for every event, in a thread so that reading continues."""

import json
import os
import queue
import subprocess
import threading
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from typing import Any

_MOST_WAITING = 1000
_LONGEST_OUTPUT = 300
_ATTEMPTS, _ANSWER_SECONDS = 6, 10.0  # of a webhook


class AlertSender(ABC):
    """Sends records, one after another, in a thread.

    `failures` counts those that could not be sent, or were dropped because too many were waiting; `notices` has
    messages about them, each once, which the caller shows and removes.
    """

    def __init__(self, flag: str):
        self.flag, self.failures = flag, 0
        self.notices: list[str] = []
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_all, daemon=True)
        self._thread.start()

    @abstractmethod
    def _run(self, record: dict[str, Any]) -> str | None:
        """Send a record; returns an error message or None."""

    def send(self, record: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._note(f"{_MOST_WAITING:,} alerts wait for {self.flag}; further ones are dropped")

    def _note(self, failure: str) -> None:
        self.failures += 1
        if failure not in self.notices:
            self.notices.append(failure)

    def close(self, seconds: float = 10.0) -> None:
        """Wait for the queued records, at most `seconds`."""
        self._closing.set()
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _run_all(self) -> None:
        while (record := self._queue.get()) is not None:
            if problem := self._run(record):
                self._note(f"{self.flag} {problem}")


class AlertCommand(AlertSender):
    """Runs a shell command for each record.

    The command gets the record as JSON on standard input, and in `WATCH_` variables of its environment. No text of the
    log becomes part of the command line. After some `seconds`, it is killed.
    """

    def __init__(self, command: str, seconds: float = 60.0):
        self.command, self._seconds = command, seconds
        super().__init__("--exec")

    def _run(self, record: dict[str, Any]) -> str | None:
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


class Webhook(AlertSender):
    """Posts each record as JSON, again after a failure: after 1, 2, 4, ... times `pause` seconds, at most 6 times.

    A receiver may get a record twice; the header `Idempotency-Key` tells.
    """

    def __init__(self, url: str, pause: float = 1.0):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`--webhook` is {url!r}; it must begin with http:// or https://.")
        self._url, self._pause = url, pause
        super().__init__("--webhook")

    def _run(self, record: dict[str, Any]) -> str | None:
        key = "-".join(str(record.get(name, "")) for name in ("event", "line_number", "ended"))
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        body, problem = json.dumps(record).encode(), ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                self._closing.wait(self._pause * 2 ** (attempt - 1))
            try:
                request = urllib.request.Request(self._url, body, headers)
                with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS):
                    return None
            except urllib.error.HTTPError as error:
                problem = f"got status {error.code}"
                if error.code < 500 and error.code not in (408, 429):
                    return problem
            except (OSError, ValueError) as error:
                problem = f"failed: {getattr(error, 'reason', error)}"
        return problem


def _plain(value: str | int | float) -> str:
    """The value of an environment variable, which cannot hold a byte 0; the system limits it to 128 kB."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")[:4096]
