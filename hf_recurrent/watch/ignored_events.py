"""Events that are usual: `watch ignore ID` adds them, and a running watch notices."""

import json
import os
import re
from pathlib import Path

_FILE = "ignored.jsonl"
_ID = re.compile(r"[0-9a-f]{8}")


class IgnoredEvents:
    """Ids of the events that a person has called usual, in a directory of saved state."""

    def __init__(self, directory: Path):
        self._path = directory / _FILE
        self._ids: set[str] = set()
        self._size = -1
        self.look()

    def __contains__(self, event: object) -> bool:
        return event in self._ids

    def look(self) -> None:
        """Read the file if it has grown."""
        try:
            size = self._path.stat().st_size
        except OSError:
            size = 0
        if size == self._size:
            return
        self._size, self._ids = size, set()
        if size:
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    self._ids.add(json.loads(line)["event"])
                except (ValueError, KeyError, TypeError):
                    continue

    def add(self, event: str) -> None:
        """Ignore an event from now on.

        Raises:
            ValueError: it is not the id of an event.
        """
        if not _ID.fullmatch(event):
            raise ValueError(f"`ID` is {event!r}; it must be the 8 digits and letters in brackets after an event.")
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event}) + "\n")
            file.flush()
            os.fsync(file.fileno())
