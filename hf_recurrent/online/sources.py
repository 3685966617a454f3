"""Sources of endless streams: files that end or grow, standard input, sockets of this machine.

A source is an iterator over chunks of bytes. An empty chunk means that no data has arrived for a moment, so that the
reader can do other work; a source that fails raises an OSError of one sentence.
"""

import ipaddress
import os
import re
import select
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hf_recurrent.data.decompression import COMPRESSIONS, read_chunks

STANDARD_INPUT = "-"
_CHUNK = 1 << 16
_TCP = re.compile(r"tcp://(?P<host>\[[^]]+\]|[^:/]+):(?P<port>\d+)/?")
# Seconds without data before an empty chunk.
_MOMENT = 0.5


def open_source(
    name: str | os.PathLike, *, follow: bool = False, start: int = 0, timeout: float | None = None
) -> Iterator[bytes]:
    """Chunks of the bytes of a source.

    Args:
        name: a file (.gz and .zst are decompressed), `-` for standard input, or `tcp://127.0.0.1:PORT` for a program
            on this machine that sends bytes to its clients.
        follow: at the end of the file, wait for more, as `tail -f` does.
        start: bytes to skip at the beginning of a file.
        timeout: seconds without a byte after which a source that can wait raises a TimeoutError; None for no limit.

    Raises:
        OSError: the source cannot be opened or read; a followed file was truncated or replaced.
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
        return _read_standard_input(timeout) if name == STANDARD_INPUT else _connect(name, timeout)
    path = Path(name)
    if not path.exists() or path.is_dir():
        raise FileNotFoundError(f"The source is {name!r}; file not found.")
    if path.suffix.lower() not in COMPRESSIONS:
        return _read_file(path, follow, start, timeout)
    if follow:
        raise ValueError(f"`follow` is True, but the source {name!r} is compressed; it must be a plain file.")
    return _skip(read_chunks(path), start, name)


def _read_file(path: Path, follow: bool, start: int, timeout: float | None) -> Iterator[bytes]:
    file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by `chunks`)
    status = os.fstat(file.fileno())
    regular = stat.S_ISREG(status.st_mode)  # False for named pipes
    if start and (not regular or status.st_size < start):
        file.close()
        raise _too_short(os.fspath(path), start, status.st_size)
    if start:
        file.seek(start)

    def read() -> bytes | None:
        if (chunk := file.read(_CHUNK)) or not follow:
            return chunk
        if regular:
            _check_unchanged(path, file)
        time.sleep(_MOMENT)
        return None

    return _poll(file, read, os.fspath(path), timeout)


def _check_unchanged(path: Path, file) -> None:
    now = os.fstat(file.fileno())
    try:
        replaced = not os.path.samestat(now, os.stat(path))
    except FileNotFoundError:
        replaced = True
    if replaced or now.st_size < file.tell():
        raise OSError(
            f"The source {str(path)!r} was {'replaced or removed' if replaced else 'truncated'} while followed; "
            "all of its data has been read. "
            f"For rotated logs, use `tail -F {path} | hf-recurrent learn ... --source -`."
        )


def _skip(chunks: Iterator[bytes], start: int, name: str) -> Iterator[bytes]:
    left = start
    for chunk in chunks:
        if left < len(chunk):
            yield chunk[left:] if left else chunk
        left = max(left - len(chunk), 0)
    if left:
        raise _too_short(name, start, start - left)


def _too_short(name: str, start: int, size: int) -> OSError:
    return OSError(
        f"The source {name!r} has {size} bytes, fewer than the {start} that were read from it before; it is not the "
        "same file."
    )


def _read_standard_input(timeout: float | None) -> Iterator[bytes]:
    descriptor = sys.stdin.fileno()
    read = _when_ready(descriptor, lambda: os.read(descriptor, _CHUNK))
    return _poll(nullcontext(), read, "standard input", timeout)


def _connect(name: str, timeout: float | None) -> Iterator[bytes]:
    match = _TCP.fullmatch(name)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise ValueError(
            f"The source is {name!r}; it must be a file, `-` for standard input, or tcp://127.0.0.1:PORT."
        )
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
    """`read`, or None if no data arrives for a moment."""

    def receive() -> bytes | None:
        # On Windows, select() takes sockets only: there, reading standard input blocks.
        ready = os.name != "posix" or select.select([descriptor], [], [], _MOMENT)[0]
        return read() if ready else None

    return receive


def _poll(
    resource: AbstractContextManager, read: Callable[[], bytes | None], name: str, timeout: float | None
) -> Iterator[bytes]:
    """Chunks of `read`, which returns None if no data arrived and b"" at the end; the resource is closed there."""
    with resource:
        last = time.monotonic()
        while (chunk := read()) != b"":
            if chunk is not None:
                last = time.monotonic()
            elif timeout is not None and time.monotonic() - last >= timeout:
                raise TimeoutError(f"The source {name!r} has stalled: no byte arrived for {timeout:g} seconds.")
            yield chunk or b""
