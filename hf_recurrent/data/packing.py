"""Documents packed once into a directory that is memory-mapped from then on.

`tokens.bin` holds all episodes concatenated, `offsets.npy` the start of each and the end of the last, and
`corpus.json` the metadata with a fingerprint of the other two. Computing it reads everything, at about 0.7 GB/s.
`verified.json` therefore remembers size, times and inode of the files that were compared; they are compared again when
one of these has changed.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout
from huggingface_hub.utils import WeakFileLock, tqdm

from hf_recurrent.checkpoints.atomic_files import CANNOT_WRITE, sync
from hf_recurrent.checkpoints.files import read_json, write_json
from hf_recurrent.data.documents import Document
from hf_recurrent.data.token_encoding import TokenEncoding

FORMAT = 1
TOKENS, OFFSETS, METADATA = "tokens.bin", "offsets.npy", "corpus.json"
_VERIFIED = "verified.json"
_OFFSETS_AT_ONCE = 1 << 22
_READ_AT_ONCE = 1 << 20


def fingerprint(parts: object) -> str:
    """A short hash of anything that can be written as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def content_fingerprint(
    tokens: Path,
    offsets: np.ndarray,
    vocab_size: int,
    end_token_id: int | None,
    progress: Callable[[int], object] = lambda count: None,
) -> str:
    """The fingerprint of a packed corpus: a hash of its tokens, the ends of its episodes and its alphabet.

    `progress` is called with the number of bytes of each piece of the tokens that was read.
    """
    content = hashlib.blake2b(fingerprint([vocab_size, end_token_id]).encode(), digest_size=16)
    for first in range(1, len(offsets), _OFFSETS_AT_ONCE):
        content.update(np.ascontiguousarray(offsets[first : first + _OFFSETS_AT_ONCE], dtype="<i8"))
    with open(tokens, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_READ_AT_ONCE))
        while count := file.readinto(buffer):
            content.update(buffer[:count])
            progress(count)
    return content.hexdigest()


def open_packed(directory: Path) -> tuple[np.ndarray, np.ndarray, dict]:
    """Tokens and offsets, memory-mapped, and the metadata; a ValueError names a file that is damaged or missing."""
    metadata = _read_metadata(directory)
    try:
        tokens = np.memmap(directory / TOKENS, dtype=metadata["dtype"], mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory / TOKENS} is missing or damaged: {error}") from error
    try:
        offsets = np.load(directory / OFFSETS, mmap_mode="r", allow_pickle=False)
        shape, dtype = offsets.shape, offsets.dtype
    except Exception as error:  # NumPy raises many types for a damaged header
        raise ValueError(f"{directory / OFFSETS} is missing or damaged: {error}") from error
    if len(tokens) != metadata["num_bytes"]:
        raise ValueError(f"{directory / TOKENS} has {len(tokens):,} tokens instead of {metadata['num_bytes']:,}.")
    if shape != (metadata["num_episodes"] + 1,) or dtype != np.dtype("<i8"):
        raise ValueError(f"{directory / OFFSETS} has another shape or type than {directory / METADATA}.")
    if os.path.getsize(directory / OFFSETS) != offsets.offset + offsets.nbytes:
        raise ValueError(f"{directory / OFFSETS} is damaged: it is longer than its header says.")
    if not _is_verified(directory):
        found = content_fingerprint(directory / TOKENS, offsets, metadata["vocab_size"], metadata["end_token_id"])
        if found != metadata.get("fingerprint") or offsets[0]:  # the checksum is of the ends
            raise ValueError(f"{directory / TOKENS} or {OFFSETS} differs from the checksum in {METADATA}.")
        remember_verified(directory)
    return tokens, offsets, metadata


def remember_verified(directory: Path) -> None:
    """Spare the next comparison of files whose checksum was just computed."""
    with contextlib.suppress(OSError):  # without it, the next use compares again
        write_json(_stamps(directory), directory / _VERIFIED)


def _read_metadata(directory: Path) -> dict[str, Any]:
    path = directory / METADATA
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        whole = (
            metadata["format"] == FORMAT
            and metadata["dtype"] in ("|u1", "<u2")
            and all(type(metadata[name]) is int for name in ("num_bytes", "num_episodes", "vocab_size"))
            and type(metadata["end_token_id"]) in (int, type(None))
        )
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from error
    if not whole:
        raise ValueError(f"{path} is damaged, or of another version.")
    return metadata


def _stamps(directory: Path) -> dict[str, list[int]]:
    """Facts of the files that change with their content; the change time cannot be set."""
    found = {name: os.stat(directory / name) for name in (TOKENS, OFFSETS, METADATA)}
    return {name: [it.st_size, it.st_mtime_ns, it.st_ctime_ns, it.st_ino] for name, it in found.items()}


def _is_verified(directory: Path) -> bool:
    try:
        return read_json(directory / _VERIFIED) == _stamps(directory)
    except ValueError:
        return False


_ABANDONED_AFTER_SECONDS = 24 * 3600
_SILENT_SECONDS = 3
_WRITE_AT_ONCE = 1 << 20
_STARTS = "starts.bin"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Packing:
    """Documents, read once and only if they have to be packed, and their encoding.

    Args:
        name: name of the corpus in messages.
        max_bytes: take whole documents in order up to this total; None for all.
        num_bytes: total length of the documents, for the progress bar; None if it is not known.
    """

    documents: Iterable[Document]
    encoding: TokenEncoding
    name: str
    max_bytes: int | None = None
    num_bytes: int | None = None


def pack_once(directory: Path, packing: Packing) -> None:
    """Make `directory` a packed corpus, unless it is one. Other processes that need the same one wait for it.

    It is written to a temporary directory, then renamed, and replaces a damaged one only then. The operating system
    releases the lock of a process that is killed, and the next one removes what that process has written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    lock = directory.with_name(directory.name + ".lock")
    if lock.is_symlink():
        raise ValueError(f"The lock file {lock} is a link; remove it.")
    with _locked(lock, packing.name):
        damage = _find_damage(directory)
        if damage is None:
            return
        if os.path.lexists(directory):
            _logger.warning("The packed corpus %s is damaged and packed again: %s", directory, damage)
        for left in directory.parent.glob(f"{directory.name}.*.incomplete*"):  # by processes that were killed
            _remove(left)
        with _packed_aside(directory, packing) as partial:
            _remove(directory)
            os.rename(partial, directory)


def pack_by_content(cache: Path, packing: Packing) -> Path:
    """Pack documents that nothing but reading them identifies; the directory is named by their content."""
    cache.mkdir(parents=True, exist_ok=True)
    for left in cache.glob("content.*.incomplete"):  # without a lock: several processes may pack at the same time
        with contextlib.suppress(OSError):
            newest = max(entry.stat().st_mtime for entry in (left, *left.iterdir()))
            if time.time() - newest > _ABANDONED_AFTER_SECONDS:
                _remove(left)
    with _packed_aside(cache / "content", packing) as partial:
        directory = cache / f"content-{open_packed(partial)[2]['fingerprint']}"
        with WeakFileLock(directory.with_name(directory.name + ".lock")):
            if _find_damage(directory) is not None:
                _remove(directory)
                os.rename(partial, directory)
    return directory


@contextlib.contextmanager
def _packed_aside(directory: Path, packing: Packing) -> Iterator[Path]:
    """A packed corpus in a temporary directory next to `directory`; removed unless it is renamed."""
    partial = directory.with_name(f"{directory.name}.{uuid.uuid4().hex}.incomplete")
    try:
        partial.mkdir()
        _pack(partial, packing)
        remember_verified(partial)
        yield partial
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        raise OSError(
            f"The corpus {packing.name!r} cannot be packed in {str(directory.parent)!r}: {error.strerror}; free some "
            "space there, or pass another `cache_dir`."
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


def _pack(directory: Path, packing: Packing) -> None:
    encoding = packing.encoding
    num_episodes, num_tokens = _write_tokens(directory / TOKENS, directory / _STARTS, packing)
    if not num_episodes:
        raise ValueError(f"corpus {packing.name!r} is empty: its documents hold no bytes.")
    _write_offsets(directory / OFFSETS, directory / _STARTS, num_episodes, num_tokens)
    (directory / _STARTS).unlink()
    offsets = np.load(directory / OFFSETS, mmap_mode="r")
    alphabet = {"vocab_size": encoding.vocab_size, "end_token_id": encoding.end_token_id}
    with _progress("computing its checksum", num_tokens * encoding.dtype.itemsize) as bar:
        fingerprint = content_fingerprint(directory / TOKENS, offsets, **alphabet, progress=bar.update)
    metadata = {
        "format": FORMAT,
        "name": packing.name,
        "num_bytes": num_tokens,
        "num_episodes": num_episodes,
        "dtype": encoding.dtype.newbyteorder("<").str,
        **alphabet,
        "fingerprint": fingerprint,
    }
    (directory / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")


def _write_tokens(path: Path, starts: Path, packing: Packing) -> tuple[int, int]:
    """Write the token ids of all documents, and the start of each as int64; returns the numbers of both."""
    limit = math.inf if packing.max_bytes is None else packing.max_bytes
    begin = end = num_episodes = 0
    expected = min(filter(None, (packing.num_bytes, packing.max_bytes)), default=None)
    with (
        open(path, "wb", buffering=_WRITE_AT_ONCE) as tokens_file,
        open(starts, "wb", buffering=_WRITE_AT_ONCE) as starts_file,
        _progress(f"packing {packing.name}", expected) as bar,
    ):
        for document, chunks in packing.documents:
            for chunk in chunks:
                ids = packing.encoding.encode(chunk, document)
                end += len(ids)
                if end > limit:
                    break
                tokens_file.write(ids)
                bar.update(len(ids))
            if end > limit:
                if not num_episodes:
                    raise ValueError(
                        f"`max_bytes` is {packing.max_bytes}, but the first document ({document}) is longer; "
                        "documents are not cut."
                    )
                break
            if end > begin:
                starts_file.write(begin.to_bytes(8, "little"))
                num_episodes, begin = num_episodes + 1, end
        tokens_file.truncate(begin * packing.encoding.dtype.itemsize)
    sync(path)
    return num_episodes, begin


def _progress(words: str, total: int | None) -> tqdm:
    return tqdm(desc=words, total=total, unit="B", unit_scale=True, delay=2)


def _write_offsets(path: Path, starts: Path, num_episodes: int, end: int) -> None:
    # Not memory-mapped: on a full disk, writing to mapped memory kills the process.
    header = {"descr": "<i8", "fortran_order": False, "shape": (num_episodes + 1,)}
    with open(starts, "rb") as source, open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        shutil.copyfileobj(source, file)
        file.write(end.to_bytes(8, "little"))
    sync(path)
