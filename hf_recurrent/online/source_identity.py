"""Recognizing a file that was read before: by the bytes that were read, not by its name."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

_FIRST, _LAST = 1 << 12, 1 << 16


class ChangedSourceError(OSError):
    """A file is not the one that was read before: rotated, replaced, truncated or edited."""


class ReadBytes:
    """The first and the last of the bytes that were read from a file, in constant memory."""

    def __init__(self) -> None:
        self.position = 0
        self._first, self._last = b"", bytearray()

    def add(self, data: bytes) -> None:
        """The next bytes of the file."""
        self._first += data[: _FIRST - len(self._first)]
        self._last += data
        self.position += len(data)
        # The reader may stop anywhere in the data, so the bytes before it are kept too.
        del self._last[: -(_LAST + len(data))]

    def skip(self, first: bytes, last: bytes, position: int) -> None:
        """The same as adding all bytes before `position`, of which these are the first and the last."""
        self._first, self._last, self.position = first, bytearray(last), position

    @staticmethod
    def places(position: int) -> tuple[int, int, int]:
        """For [`skip`]: the number of the first bytes, the place of the last, and their number."""
        return min(position, _FIRST), max(position - _LAST, 0), min(position, _LAST)

    def last(self, count: int) -> bytes:
        """At most `count` bytes before the position."""
        return bytes(self._last[-count:])

    def digest(self, position: int) -> str:
        """A hash of the bytes around the beginning of the file and of those before `position`."""
        end = len(self._last) - (self.position - position)
        first, last = self._first[:position], bytes(self._last[max(end - _LAST, 0) : end])
        return hashlib.sha256(b"%d %d " % (len(first), len(last)) + first + last).hexdigest()


def identity_of(status: os.stat_result, digest: str) -> dict[str, Any]:
    """The identity of a file, as JSON."""
    return {"device": status.st_dev, "inode": status.st_ino, "digest": digest}


def is_same_file(status: os.stat_result, identity: Mapping[str, Any]) -> bool:
    """True if it is the very file, under whatever name."""
    return (status.st_dev, status.st_ino) == (identity.get("device"), identity.get("inode"))
