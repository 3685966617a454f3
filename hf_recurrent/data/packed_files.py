"""The files of a packed corpus, used only after their content was compared with its checksum.

`tokens.bin` holds all episodes concatenated, `offsets.npy` the start of each and the end of the last, and
`corpus.json` the metadata with a fingerprint of the other two. Computing it reads everything, at about 0.7 GB/s.
`verified.json` therefore remembers size, times and inode of the files that were compared; they are compared again when
one of these has changed.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hf_recurrent.checkpoints.files import write_json

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

    Args:
        progress: called with the number of bytes of each piece of the tokens that was read.
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
    """Tokens and offsets, memory-mapped, and the metadata.

    Raises:
        ValueError: a file is missing or damaged; the message names it.
    """
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
    if _read_verified(directory) != _stamps(directory):
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


def _read_verified(directory: Path) -> Any:
    try:
        return json.loads((directory / _VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
