"""Documents packed once into a directory that is memory-mapped from then on.

A packed corpus is three files: `tokens.bin`, all episodes concatenated; `offsets.npy`, the start of each and the end
of the last; `corpus.json`, the metadata.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from huggingface_hub.utils import WeakFileLock, tqdm

from hf_recurrent.data.readers import Document
from hf_recurrent.data.token_encoding import TokenEncoding

FORMAT = 1
_TOKENS, _OFFSETS, _METADATA = "tokens.bin", "offsets.npy", "corpus.json"
_COPIED_AT_ONCE = 1 << 16
_ABANDONED_AFTER_SECONDS = 24 * 3600


def fingerprint(parts: object) -> str:
    """A short hash of anything that can be written as JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def pack_once(
    directory: Path,
    documents: Callable[[], Iterable[Document]],
    encoding: TokenEncoding,
    name: str,
    max_bytes: int | None,
) -> None:
    """Make `directory` a packed corpus, unless it is one. Other processes that need the same one wait for it.

    It is written to a temporary directory, then renamed, so that a directory of that name is always whole.

    Raises:
        ValueError: the documents hold no byte, or the first is longer than `max_bytes`.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(directory.with_name(directory.name + ".lock")):
        if is_packed(directory):
            return
        _remove_abandoned(directory)
        partial = directory.with_name(f"{directory.name}.{uuid.uuid4().hex}.incomplete")
        partial.mkdir()
        try:
            _pack(partial, documents(), encoding, name, max_bytes)
            if directory.exists():  # damaged
                shutil.rmtree(directory)
            os.rename(partial, directory)
        except OSError:
            if not is_packed(directory):  # otherwise another process was first on a file system without locks
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def is_packed(directory: Path) -> bool:
    """True if `directory` holds a whole packed corpus."""
    try:
        open_packed(directory)
    except (OSError, ValueError, KeyError):
        return False
    return True


def open_packed(directory: Path) -> tuple[np.ndarray, np.ndarray, dict]:
    """Tokens and offsets, memory-mapped, and the metadata.

    Raises:
        FileNotFoundError, ValueError, KeyError: it is missing or not whole.
    """
    metadata = json.loads((directory / _METADATA).read_text())
    tokens = np.memmap(directory / _TOKENS, dtype=np.dtype(metadata["dtype"]), mode="r")
    offsets = np.load(directory / _OFFSETS, mmap_mode="r", allow_pickle=False)
    if metadata["format"] != FORMAT or len(tokens) != metadata["num_bytes"]:
        raise ValueError(f"{directory / _TOKENS} is damaged; remove {directory}.")
    if len(offsets) != metadata["num_episodes"] + 1 or offsets[-1] != len(tokens):
        raise ValueError(f"{directory / _OFFSETS} is damaged; remove {directory}.")
    return tokens, offsets, metadata


def _pack(
    directory: Path, documents: Iterable[Document], encoding: TokenEncoding, name: str, max_bytes: int | None
) -> None:
    begin = end = 0
    num_episodes = 0
    content = hashlib.blake2b(fingerprint([encoding.vocab_size, encoding.end_token_id]).encode(), digest_size=16)
    starts = directory / "starts.bin"
    with (
        open(directory / _TOKENS, "wb") as tokens_file,
        open(starts, "wb") as starts_file,
        tqdm(desc=f"packing {name}", unit="B", unit_scale=True, delay=2) as bar,
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
                content.update(end.to_bytes(8, "little"))
                num_episodes, begin = num_episodes + 1, end
        tokens_file.truncate(begin * encoding.dtype.itemsize)
        tokens_file.flush()
        os.fsync(tokens_file.fileno())
    if not num_episodes:
        raise ValueError(f"corpus {name!r} is empty: its documents hold no bytes.")
    _write_offsets(directory / _OFFSETS, starts, num_episodes, begin)
    starts.unlink()
    for piece in _pieces(np.memmap(directory / _TOKENS, dtype=np.uint8, mode="r")):
        content.update(piece)
    metadata = {
        "format": FORMAT,
        "name": name,
        "num_bytes": begin,
        "num_episodes": num_episodes,
        "dtype": encoding.dtype.newbyteorder("<").str,
        "vocab_size": encoding.vocab_size,
        "end_token_id": encoding.end_token_id,
        "fingerprint": content.hexdigest(),
    }
    (directory / _METADATA).write_text(json.dumps(metadata, indent=2) + "\n")


def _encoded(document: str, chunks: Iterable[bytes], encoding: TokenEncoding) -> Iterator[np.ndarray]:
    return (encoding.encode(chunk, document) for chunk in chunks)


def _write_offsets(path: Path, starts: Path, num_episodes: int, end: int) -> None:
    offsets = np.lib.format.open_memmap(path, mode="w+", dtype="<i8", shape=(num_episodes + 1,))
    with open(starts, "rb") as file:
        for first in range(0, num_episodes, _COPIED_AT_ONCE):
            piece = np.frombuffer(file.read(8 * _COPIED_AT_ONCE), dtype="<i8")
            offsets[first : first + len(piece)] = piece
    offsets[num_episodes] = end
    offsets.flush()


def _pieces(array: np.ndarray, size: int = 1 << 24) -> Iterator[np.ndarray]:
    return (array[first : first + size] for first in range(0, len(array), size))


def _remove_abandoned(directory: Path) -> None:
    """Remove directories that killed processes left; recent ones may be in use on a file system without locks."""
    for path in directory.parent.glob(f"{directory.name}.*.incomplete"):
        with contextlib.suppress(OSError):
            if time.time() - (path / _TOKENS).stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                shutil.rmtree(path)
