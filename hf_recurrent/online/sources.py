"""Sources of endless streams: files that end or grow, standard input, sockets of this machine.

Files that were read before are recognized by their bytes, not by their names.

A source is an iterator over chunks of bytes. An empty chunk means that no data has arrived for a moment, so that the
reader can do other work. A source that fails raises an OSError.
"""

import hashlib
import ipaddress
import os
import re
import select
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import IO, Any

from hf_recurrent.data.decompression import COMPRESSIONS, check_installed, read_chunks

STANDARD_INPUT = "-"
_CHUNK = 1 << 16
_TCP = re.compile(r"tcp://(?P<host>\[[^]]+\]|[^:/]+):(?P<port>\d+)/?")
# Seconds without data before an empty chunk.
_MOMENT = 0.5
# Bytes before a chunk that are read again, to notice that a file was truncated and rewritten.
_COMPARED = 1 << 12
# First bytes of a file, and bytes before a position, by which it is recognized.
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


def is_same_file(status: os.stat_result, identity: Mapping[str, Any]) -> bool:
    """True if the file has the same inode, under whatever name."""
    return (status.st_dev, status.st_ino) == (identity.get("device"), identity.get("inode"))


class Source(Iterator[bytes]):
    """Chunks of bytes; for regular files, whose status is given, also their identity.

    `read` has the bytes of the file before the first chunk.
    """

    def __init__(self, chunks: Iterator[bytes], status: os.stat_result | None = None, read: ReadBytes | None = None):
        self._chunks, self._status = chunks, status
        self._read = read or ReadBytes()

    def __next__(self) -> bytes:
        chunk = next(self._chunks)
        if self._status is not None:
            self._read.add(chunk)
        return chunk

    def identity(self, position: int) -> dict[str, Any] | None:
        """JSON by which [`open_source`] recognizes the bytes of a file before `position`; None for other sources.

        The position is in or at the end of the last chunk.
        """
        if self._status is None:
            return None
        digest = self._read.digest(position)
        return {"device": self._status.st_dev, "inode": self._status.st_ino, "digest": digest}


def open_source(
    name: str | os.PathLike,
    *,
    follow: bool = False,
    start: int = 0,
    timeout: float | None = None,
    identity: Mapping[str, Any] | None = None,
) -> Source:
    """Open a source of bytes.

    Args:
        name: a file (.gz and .zst are decompressed), `-` for standard input, or `tcp://127.0.0.1:PORT` for a program
            on this machine that sends bytes to its clients.
        follow: at the end of the file, wait for more, as `tail -f` does.
        start: bytes to skip at the beginning of a file.
        timeout: seconds without a byte after which a source that can wait raises a TimeoutError; None for no limit.
        identity: [`Source.identity`] of the file at `start`, when it was read before; None to trust its name.

    Raises:
        ChangedSourceError: the bytes before `start` have changed, or there are fewer.
        OSError: the source cannot be opened or read; a file was truncated or replaced while it was read.
        ValueError: the name is not a source, or an argument does not apply to it.
    """
    name = os.fspath(name)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"`timeout` is {timeout}; it must be more than 0 seconds.")
    if name == STANDARD_INPUT or "://" in name:
        if follow:
            raise ValueError(f"`follow` is True, but the source is {name!r}; it must be a file.")
        if start:
            raise ValueError(f"`start` is {start}, but the source is {name!r}; only a file has a position.")
        return _read_standard_input(timeout) if name == STANDARD_INPUT else Source(_connect(name, timeout))
    path = Path(name)
    try:
        status = path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"`source` is {name!r}; file not found.") from None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"`source` is {name!r}, a directory; it must be a file.")
    if stat.S_ISSOCK(status.st_mode):
        raise ValueError(f"`source` is {name!r}, a Unix socket; it must be a file, `-` or tcp://127.0.0.1:PORT.")
    check_installed(path)
    compressed = path.suffix.lower() in COMPRESSIONS
    if compressed and follow:
        raise ValueError(f"`follow` is True, but the source {name!r} is compressed; it must be a plain file.")
    read = ReadBytes()
    if compressed:
        chunks = _skip(read_chunks(path), start, name, read)
    else:
        chunks = _read_file(path, follow, start, timeout, read)
    if start and identity is not None and read.digest(start) != identity.get("digest"):
        how = "it was changed or written anew" if is_same_file(status, identity) else "it was replaced by another file"
        raise ChangedSourceError(
            f"The source {name!r} has other bytes before byte {start:,} than when it was read: {how}."
        )
    return Source(chunks, status if stat.S_ISREG(status.st_mode) else None, read)


def _read_file(path: Path, follow: bool, start: int, timeout: float | None, before: ReadBytes) -> Iterator[bytes]:
    name = os.fspath(path)
    try:
        # A pipe without a writer must not block, because a signal or a timeout ends the wait.
        file = open(path, "rb", buffering=0, opener=_open_without_waiting)  # noqa: SIM115 (closed by `_poll`)
    except OSError as error:
        raise OSError(f"The source {name!r} cannot be opened: {error.strerror}.") from error
    status = os.fstat(file.fileno())
    regular = stat.S_ISREG(status.st_mode)
    if start and (not regular or status.st_size < start):
        file.close()
        raise _too_short(name, start, status.st_size)
    if start:
        before.skip(file, start)
        file.seek(start)

    def read() -> bytes | None:
        chunk, change = file.read(_CHUNK), None
        if not chunk and follow and regular and (change := file_change(path, file)):
            chunk = file.read(_CHUNK)  # appended just before the change
        if chunk and regular:
            position = file.tell() - len(chunk)
            if not has_before(file, position, before.last(_COMPARED)):
                raise ChangedSourceError(
                    f"The source {name!r} was changed while it was read: it has other bytes before byte {position:,}."
                )
        if chunk or not follow:
            return chunk
        if change:
            raise OSError(
                f"The source {name!r} was {change} while followed; all of its data has been read. "
                f"For rotated logs, use `tail -F {path} | hf-recurrent learn ... --source -`."
            )
        time.sleep(_MOMENT)
        return None

    return _poll(file, read if regular else _when_ready(file.fileno(), read), name, timeout)


def _open_without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _skip(chunks: Iterator[bytes], start: int, name: str, read: ReadBytes) -> Iterator[bytes]:
    """The chunks after the first `start` bytes, which are read at once."""
    while read.position < start:
        chunk = next(chunks, b"")
        if not chunk:
            raise _too_short(name, start, read.position)
        used = start - read.position
        read.add(chunk[:used])
        if used < len(chunk):
            return chain([chunk[used:]], chunks)
    return chunks


def _too_short(name: str, start: int, size: int) -> OSError:
    return ChangedSourceError(
        f"The source {name!r} has {size:,} bytes, fewer than the {start:,} that were read from it before; it is not "
        "the same file."
    )


def _read_standard_input(timeout: float | None) -> Source:
    if sys.stdin is None:
        raise OSError("`source` is '-', but standard input is closed.")
    descriptor = sys.stdin.fileno()
    read = _when_ready(descriptor, lambda: os.read(descriptor, _CHUNK))
    chunks, status = _poll(nullcontext(), read, "standard input", timeout), os.fstat(descriptor)
    is_whole_file = stat.S_ISREG(status.st_mode) and os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    return Source(chunks, status if is_whole_file else None)


def _connect(name: str, timeout: float | None) -> Iterator[bytes]:
    match = _TCP.fullmatch(name)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise ValueError(f"`source` is {name!r}; it must be a file, `-` for standard input, or tcp://127.0.0.1:PORT.")
    host, port = match["host"].strip("[]"), int(match["port"])
    if host != "localhost" and not _is_loopback(host):
        raise ValueError(
            f"The source {name!r} is on another machine; it must be on this one, because the connection is not "
            f"encrypted. Forward the port (`ssh -L {port}:localhost:{port} {host}`) and use tcp://127.0.0.1:{port}."
        )
    try:
        connection = socket.create_connection((host, port))
    except OSError as error:
        raise OSError(f"The source {name!r} cannot be reached: {error.strerror or error}.") from error

    def receive() -> bytes:
        try:
            return connection.recv(_CHUNK)
        except OSError as error:
            raise OSError(f"The connection to the source {name!r} broke: {error.strerror or error}.") from error

    return _poll(connection, _when_ready(connection.fileno(), receive), name, timeout)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _when_ready(descriptor: int, read: Callable[[], bytes]) -> Callable[[], bytes | None]:
    """A function that calls `read`, or returns None if no data arrives for a moment."""

    def receive() -> bytes | None:
        # On Windows, select() takes sockets only: there, reading standard input blocks.
        ready = os.name != "posix" or select.select([descriptor], [], [], _MOMENT)[0]
        return read() if ready else None

    return receive


def _poll(
    resource: AbstractContextManager, read: Callable[[], bytes | None], name: str, timeout: float | None
) -> Iterator[bytes]:
    """Chunks of `read`, which returns None if no data arrived and b"" at the end; then the resource is closed."""
    with resource:
        last = time.monotonic()
        while (chunk := read()) != b"":
            if chunk is not None:
                last = time.monotonic()
            elif timeout is not None and time.monotonic() - last >= timeout:
                raise TimeoutError(f"The source {name!r} has stalled: no byte arrived for {timeout:g} seconds.")
            yield chunk or b""
