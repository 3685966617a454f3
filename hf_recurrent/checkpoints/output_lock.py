"""A lock that keeps two runs from writing to one directory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

# The Trainer does not upload files that begin with an underscore.
LOCK_FILE = "_lock"


@contextmanager
def output_lock(directory: str | os.PathLike) -> Iterator[None]:
    """Hold the lock of `directory`, which is created if it does not exist.

    The operating system releases the lock when the process ends, however it ends. Inside one process the lock may be
    taken again.

    Raises:
        ValueError: another process holds the lock.
    """
    os.makedirs(directory, exist_ok=True)
    lock = FileLock(Path(directory, LOCK_FILE).absolute(), timeout=0, thread_local=False, is_singleton=True)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"`output_dir` is {os.fspath(directory)!r}, which another running process writes to; wait for it, stop "
            "it, or choose another directory."
        ) from None
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            # While it is held: a process that waits for this file notices that it is gone, and creates a new one.
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
