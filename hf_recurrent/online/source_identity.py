"""Recognizing a file that was read before by its bytes instead of its name, and changes of one that grows."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

_FIRST, _LAST = 1 << 12, 1 << 16


class ChangedSourceError(OSError):
    """A file has other bytes than when it was read: it was rotated, replaced, truncated or edited."""


class ReadBytes:
    """The first and the last bytes that were read from a file, in constant memory; `position` counts all of them."""

    def __init__(self) -> None:
        self.position = 0
        self._first, self._last = b"", bytearray()

    def add(self, data: bytes) -> None:
        """Add the next bytes of the file."""
        self._first += data[: _FIRST - len(self._first)]
        self._last += data
        self.position += len(data)
        # The reader may stop anywhere in the data, so the bytes before it are kept too.
        del self._last[: -(_LAST + len(data))]

    def skip(self, file: IO[bytes], position: int) -> None:
        """The same as adding all bytes before `position`, without reading them all."""
        self._first = read_at(file, 0, min(position, _FIRST))
        begin = max(position - _LAST, 0)
        self._last, self.position = bytearray(read_at(file, begin, position - begin)), position

    def last(self, count: int) -> bytes:
        """At most `count` bytes before the position."""
        return bytes(self._last[-count:])

    def digest(self, position: int) -> str:
        """Hash of the first bytes of the file and the bytes before `position`."""
        end = len(self._last) - (self.position - position)
        first, last = self._first[:position], bytes(self._last[max(end - _LAST, 0) : end])
        return hashlib.sha256(b"%d %d " % (len(first), len(last)) + first + last).hexdigest()


def read_at(file: IO[bytes], offset: int, count: int) -> bytes:
    """Bytes at another offset of a file; its position stays."""
    position = file.tell()
    file.seek(offset)
    data = file.read(count)
    file.seek(position)
    return data


def has_before(file: IO[bytes], position: int, data: bytes) -> bool:
    """True if a file still has these bytes before a position; False if it was truncated or rewritten."""
    is_long = os.fstat(file.fileno()).st_size >= position  # else there may be no bytes to compare
    return is_long and read_at(file, position - len(data), len(data)) == data


def file_change(path: Path, file: IO[bytes]) -> str | None:
    """Change of an open file that was read to its end: "replaced", "removed" or "truncated"; None if it only grew."""
    now = os.fstat(file.fileno())
    try:
        if not os.path.samestat(now, os.stat(path)):
            return "replaced"
    except FileNotFoundError:
        return "removed"
    return "truncated" if now.st_size < file.tell() else None


def identity_of(status: os.stat_result, digest: str) -> dict[str, Any]:
    """The identity of a file, as JSON."""
    return {"device": status.st_dev, "inode": status.st_ino, "digest": digest}


def is_same_file(status: os.stat_result, identity: Mapping[str, Any]) -> bool:
    """True if the file has the same inode, under whatever name."""
    return (status.st_dev, status.st_ino) == (identity.get("device"), identity.get("inode"))
