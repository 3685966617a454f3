"""Where endless streams come from: files that end or grow, standard input, sockets of this machine.

A source is an iterator of chunks of bytes. An empty chunk says that nothing has come for a moment, so that its reader
can look after other things; a source that fails raises an OSError of one clear sentence.
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
from pathlib import Path

from hf_recurrent.data.decompression import COMPRESSIONS, read_chunks

STANDARD_INPUT = "-"
_CHUNK = 1 << 16
_TCP = re.compile(r"tcp://(?P<host>\[[^]]+\]|[^:/]+):(?P<port>\d+)/?")
# Seconds of silence after which an empty chunk is given.
_MOMENT = 0.5


def open_source(
    name: str | os.PathLike, *, follow: bool = False, start: int = 0, timeout: float | None = None
) -> Iterator[bytes]:
    """Chunks of the bytes of a source.

    Args:
        name: a file (.gz and .zst are read through), `-` for standard input, or `tcp://127.0.0.1:PORT`, where
            something on this machine sends bytes to whoever connects.
        follow: at the end of the file wait for what is appended to it, as `tail -f` does.
        start: bytes at the beginning of a file to be left out.
        timeout: seconds without a byte after which a source that can wait has stalled; None for never.

    Raises:
        FileNotFoundError, OSError: there is no such file, it cannot be read, it shrank or was replaced while it was
            followed; nobody listens at the port, or the connection broke.
        TimeoutError: the source has stalled.
        ValueError: the name is no source, or an argument does not go with it.
    """
    name = os.fspath(name)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"`timeout` is {timeout}; it must be more than 0 seconds.")
    is_file = name != STANDARD_INPUT and "://" not in name
    if follow and not is_file:
        raise ValueError(f"`follow` is for files, but the source is {name!r}, which ends when its sender closes it.")
    if start and not is_file:
        raise ValueError(f"`start` is {start}, but the source {name!r} has no beginning to count from.")
    if name == STANDARD_INPUT:
        return _read_standard_input(timeout)
    if not is_file:
        return _connect(name, timeout)
    path = Path(name)
    if not path.exists() or path.is_dir():
        raise FileNotFoundError(f"The source `{name}` is no file.")
    if path.suffix.lower() in COMPRESSIONS:
        if follow:
            raise ValueError(f"`follow` needs a plain file, but the source `{name}` is compressed.")
        return _leave_out(read_chunks(path), start, name)
    return _read_file(path, follow, start, timeout)


def _read_file(path: Path, follow: bool, start: int, timeout: float | None) -> Iterator[bytes]:
    file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed when the chunks are)
    status = os.fstat(file.fileno())
    regular = stat.S_ISREG(status.st_mode)  # and no pipe with a name
    if start and (not regular or status.st_size < start):
        file.close()
        raise _too_short(os.fspath(path), start, status.st_size)
    if start:
        file.seek(start)

    def chunks() -> Iterator[bytes]:
        with file:
            quiet_since = time.monotonic()
            while True:
                if chunk := file.read(_CHUNK):
                    quiet_since = time.monotonic()
                    yield chunk
                    continue
                if not follow:
                    return
                if regular:
                    _check_still_there(path, file)
                _check_quiet(os.fspath(path), quiet_since, timeout)
                yield b""
                time.sleep(_MOMENT)

    return chunks()


def _check_still_there(path: Path, file) -> None:
    now = os.fstat(file.fileno())
    try:
        replaced = not os.path.samestat(now, os.stat(path))
    except FileNotFoundError:
        replaced = True
    if replaced or now.st_size < file.tell():
        raise OSError(
            f"The source `{path}` was {'replaced or removed' if replaced else 'cut'} while it was followed; all that "
            f"was in it has been read. A log that is rotated can be read as `tail -F {path} | hf-recurrent learn ... "
            "--source -`."
        )


def _leave_out(chunks: Iterator[bytes], start: int, name: str) -> Iterator[bytes]:
    left = start
    for chunk in chunks:
        if left < len(chunk):
            yield chunk[left:] if left else chunk
        left = max(left - len(chunk), 0)
    if left:
        raise _too_short(name, start, start - left)


def _too_short(name: str, start: int, size: int) -> OSError:
    return OSError(
        f"The source `{name}` holds {size} bytes, fewer than the {start} that were read from it before: it is another "
        "file by now."
    )


def _read_standard_input(timeout: float | None) -> Iterator[bytes]:
    descriptor = sys.stdin.fileno()
    return _read_when_ready(descriptor, lambda: os.read(descriptor, _CHUNK), "standard input", timeout)


def _connect(name: str, timeout: float | None) -> Iterator[bytes]:
    match = _TCP.fullmatch(name)
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise ValueError(f"The source {name!r} must be a file, `-` for standard input, or tcp://127.0.0.1:PORT.")
    host, port = match["host"].strip("[]"), int(match["port"])
    if host != "localhost" and not _is_loopback(host):
        raise ValueError(
            f"The source {name!r} is another machine, whose bytes nothing would protect; only the loopback is read. "
            f"Forward the port (`ssh -L {port}:localhost:{port} {host}`) and use tcp://127.0.0.1:{port}."
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

    def chunks() -> Iterator[bytes]:
        with connection:
            yield from _read_when_ready(connection.fileno(), receive, name, timeout)

    return chunks()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read_when_ready(descriptor: int, read: Callable[[], bytes], name: str, timeout: float | None) -> Iterator[bytes]:
    quiet_since = time.monotonic()
    while True:
        # Windows can wait for sockets only: there standard input is read as it comes.
        if os.name == "posix" and not select.select([descriptor], [], [], _MOMENT)[0]:
            _check_quiet(name, quiet_since, timeout)
            yield b""
            continue
        if not (chunk := read()):
            return
        quiet_since = time.monotonic()
        yield chunk


def _check_quiet(name: str, since: float, timeout: float | None) -> None:
    if timeout is not None and time.monotonic() - since >= timeout:
        raise TimeoutError(f"The source `{name}` has stalled: not one byte came for {timeout:g} seconds.")
