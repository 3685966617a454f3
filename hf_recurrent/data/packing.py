"""Documents packed once into a directory that is memory-mapped from then on."""

import contextlib
import errno
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from huggingface_hub.utils import WeakFileLock, tqdm

from hf_recurrent.data.documents import Document
from hf_recurrent.data.packed_files import (
    FORMAT,
    METADATA,
    OFFSETS,
    TOKENS,
    content_fingerprint,
    open_packed,
    remember_verified,
)
from hf_recurrent.data.token_encoding import TokenEncoding

# Of a directory whose lock does not tell whether a process writes to it.
_ABANDONED_AFTER_SECONDS = 24 * 3600
_SILENT_SECONDS = 3
_WRITE_AT_ONCE = 1 << 20
# Errors of writing, whatever was written.
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)

_logger = logging.getLogger(__name__)


def pack_once(
    directory: Path,
    documents: Callable[[], Iterable[Document]],
    encoding: TokenEncoding,
    name: str,
    max_bytes: int | None,
    num_bytes: int | None = None,
) -> None:
    """Make `directory` a packed corpus, unless it is one. Other processes that need the same one wait for it.

    It is written to a temporary directory, then renamed, and replaces a damaged one only then. The operating system
    releases the lock of a process that is killed, and the next one removes what that process has written.

    Args:
        num_bytes: total length of the documents, for the progress bar; None if it is not known.

    Raises:
        ValueError: the documents hold no byte, or the first is longer than `max_bytes`; or the lock file is a link.
        OSError: the disk is full or read-only.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = directory.with_name(directory.name + ".lock")
    if lock.is_symlink():
        raise ValueError(f"The lock file {lock} is a link; remove it.")
    with _locked(lock, name):
        damage = _find_damage(directory)
        if damage is None:
            return
        if os.path.lexists(directory):
            _logger.warning("The packed corpus %s is damaged and packed again: %s", directory, damage)
        try:
            with _packed_aside(directory, documents, encoding, name, max_bytes, num_bytes) as partial:
                _remove(directory)
                os.rename(partial, directory)
        except OSError:
            if _find_damage(directory) is not None:  # else another process was first on a file system without locks
                raise


def pack_by_content(
    cache: Path, documents: Iterable[Document], encoding: TokenEncoding, name: str, max_bytes: int | None
) -> Path:
    """Pack documents that nothing but reading them identifies; the directory is named by their content.

    Raises:
        ValueError, OSError: see [`pack_once`].
    """
    cache.mkdir(parents=True, exist_ok=True)
    with _packed_aside(cache / "content", lambda: documents, encoding, name, max_bytes) as partial:
        directory = cache / f"content-{open_packed(partial)[2]['fingerprint']}"
        with WeakFileLock(directory.with_name(directory.name + ".lock")):
            if _find_damage(directory) is not None:
                _remove(directory)
                os.rename(partial, directory)
    return directory


@contextlib.contextmanager
def _packed_aside(
    directory: Path,
    documents: Callable[[], Iterable[Document]],
    encoding: TokenEncoding,
    name: str,
    max_bytes: int | None,
    num_bytes: int | None = None,
) -> Iterator[Path]:
    """A packed corpus in a temporary directory beside `directory`, to be renamed; what is not is removed."""
    _remove_abandoned(directory)
    partial = directory.with_name(f"{directory.name}.{uuid.uuid4().hex}.incomplete")
    try:
        with _in_use(partial):
            partial.mkdir()
            _pack(partial, documents(), encoding, name, max_bytes, num_bytes)
            remember_verified(partial)
            yield partial
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        raise OSError(
            f"The corpus {name!r} cannot be packed in {str(directory.parent)!r}: {error.strerror}; free some space "
            "there, or pass another `cache_dir`."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(lock: Path, name: str) -> Iterator[None]:
    """Hold the lock of a packed corpus; say so if another process has it for long."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(lock, timeout=_SILENT_SECONDS))
        except Timeout:
            _logger.warning("Another process packs the corpus %r; waiting for it.", name)
            stack.enter_context(WeakFileLock(lock))
        yield


@contextlib.contextmanager
def _in_use(partial: Path) -> Iterator[None]:
    """Hold a lock that tells others that this process writes to `partial`."""
    lock = FileLock(_lock_of(partial), timeout=0)
    try:
        with contextlib.suppress(OSError, NotImplementedError):  # a file system without locks
            lock.acquire()
        yield
    finally:
        _lock_of(partial).unlink(missing_ok=True)
        lock.release()


def _lock_of(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.lock")


def _find_damage(directory: Path) -> str | None:
    """The damage of a packed corpus in words, None if it is whole."""
    try:
        open_packed(directory)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _remove(directory: Path) -> None:
    if directory.is_symlink() or not directory.is_dir():
        directory.unlink(missing_ok=True)
    else:
        shutil.rmtree(directory)


def _pack(
    directory: Path,
    documents: Iterable[Document],
    encoding: TokenEncoding,
    name: str,
    max_bytes: int | None,
    num_bytes: int | None,
) -> None:
    begin = end = 0
    num_episodes = 0
    starts = directory / "starts.bin"
    with (
        open(directory / TOKENS, "wb", buffering=_WRITE_AT_ONCE) as tokens_file,
        open(starts, "wb", buffering=_WRITE_AT_ONCE) as starts_file,
        _progress(f"packing {name}", min(filter(None, (num_bytes, max_bytes)), default=None)) as bar,
    ):
        for document, chunks in documents:
            for ids in _encoded(document, chunks, encoding):
                end += len(ids)
                if max_bytes is not None and end > max_bytes:
                    break
                tokens_file.write(ids)
                bar.update(len(ids))
            if max_bytes is not None and end > max_bytes:
                if not num_episodes:
                    raise ValueError(
                        f"`max_bytes` is {max_bytes}, but the first document ({document}) is longer; "
                        "documents are not cut."
                    )
                break
            if end > begin:
                starts_file.write(begin.to_bytes(8, "little"))
                num_episodes, begin = num_episodes + 1, end
        tokens_file.truncate(begin * encoding.dtype.itemsize)
        tokens_file.flush()
        os.fsync(tokens_file.fileno())
    if not num_episodes:
        raise ValueError(f"corpus {name!r} is empty: its documents hold no bytes.")
    _write_offsets(directory / OFFSETS, starts, num_episodes, begin)
    starts.unlink()
    offsets = np.load(directory / OFFSETS, mmap_mode="r")
    alphabet = (encoding.vocab_size, encoding.end_token_id)
    with _progress("computing its checksum", begin * encoding.dtype.itemsize) as bar:
        checksum = content_fingerprint(directory / TOKENS, offsets, *alphabet, progress=bar.update)
    metadata = {
        "format": FORMAT,
        "name": name,
        "num_bytes": begin,
        "num_episodes": num_episodes,
        "dtype": encoding.dtype.newbyteorder("<").str,
        "vocab_size": encoding.vocab_size,
        "end_token_id": encoding.end_token_id,
        "fingerprint": checksum,
    }
    (directory / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")


def _progress(words: str, total: int | None) -> tqdm:
    return tqdm(desc=words, total=total, unit="B", unit_scale=True, delay=2)


def _encoded(document: str, chunks: Iterable[bytes], encoding: TokenEncoding) -> Iterator[np.ndarray]:
    return (encoding.encode(chunk, document) for chunk in chunks)


def _write_offsets(path: Path, starts: Path, num_episodes: int, end: int) -> None:
    # Not memory-mapped: on a full disk, writing to mapped memory kills the process.
    header = {"descr": "<i8", "fortran_order": False, "shape": (num_episodes + 1,)}
    with open(starts, "rb") as source, open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(source, file)
        file.write(end.to_bytes(8, "little"))
        file.flush()
        os.fsync(file.fileno())


def _remove_abandoned(directory: Path) -> None:
    """Remove directories that killed processes left."""
    for path in directory.parent.glob(f"{directory.name}.*.incomplete"):
        with contextlib.suppress(OSError):
            if _is_abandoned(path):
                shutil.rmtree(path)
                _lock_of(path).unlink(missing_ok=True)


def _is_abandoned(partial: Path) -> bool:
    if _lock_of(partial).exists():
        lock = FileLock(_lock_of(partial), timeout=0)
        try:
            with lock:
                return True
        except Timeout:
            return False
        except NotImplementedError:
            pass
    newest = max(entry.stat().st_mtime for entry in [*partial.iterdir()] or [partial])
    return time.time() - newest > _ABANDONED_AFTER_SECONDS
