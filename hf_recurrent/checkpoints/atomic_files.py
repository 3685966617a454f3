"""Writing files atomically, and errors of full disks, without torch."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors of writing, whatever was written: the disk or the quota is full, the file too large, the disk read-only.
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def naming_file(path: str | os.PathLike) -> Iterator[None]:
    """Inside the block, an error of a full disk names the file or directory that is written; the system names none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in CANNOT_WRITE:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """A new empty file that is flushed and renamed to `path` when the block ends, and deleted after an exception.

    It is created exclusively: a file or link that already has its name is replaced, not written through.
    """
    partial = Path(f"{os.fspath(path)}.partial")
    partial.unlink(missing_ok=True)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        with naming_file(path):
            yield partial
            sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(partial.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
