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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hf_recurrent.checkpoints.files import write_json

FORMAT = 1
TOKENS, OFFSETS, METADATA = "tokens.bin", "offsets.npy", "corpus.json"
_VERIFIED = "verified.json"
_AT_ONCE = 1 << 22
# Field of the metadata → allowed types, and whether a value is allowed.
_METADATA: dict[str, tuple[tuple[type, ...], Callable[[Any], bool]]] = {
    "format": ((int,), lambda value: value == FORMAT),
    "num_bytes": ((int,), lambda value: value >= 1),
    "num_episodes": ((int,), lambda value: value >= 1),
    "vocab_size": ((int,), lambda value: 1 <= value <= 1 << 16),
    "end_token_id": ((int, type(None)), lambda value: value is None or value >= 0),
    "dtype": ((str,), lambda value: value in ("|u1", "<u2")),
    "fingerprint": ((str,), lambda value: True),
}
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
    for piece in _pieces(offsets[1:]):
        content.update(np.ascontiguousarray(piece, dtype="<i8"))
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
    stamps = _stamps(directory)
    if _read_verified(directory) != stamps:
        _verify(directory, tokens, offsets, metadata)
        _write_verified(directory, stamps)
    return tokens, offsets, metadata


def remember_verified(directory: Path) -> None:
    """Spare the comparison of files whose checksum was just computed."""
    _write_verified(directory, _stamps(directory))


def _read_metadata(directory: Path) -> dict[str, Any]:
    path = directory / METADATA
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}") from error
    if not isinstance(metadata, dict):
        raise ValueError(f"{path} is damaged: it holds a JSON {type(metadata).__name__} instead of an object.")
    for name, (kind, is_allowed) in _METADATA.items():
        value = metadata.get(name)
        if name not in metadata or type(value) not in kind or not is_allowed(value):
            raise ValueError(f"{path} is damaged: its `{name}` is {value!r:.40}.")
    return metadata


def _verify(directory: Path, tokens: np.ndarray, offsets: np.ndarray, metadata: dict[str, Any]) -> None:
    """Raise a ValueError unless the content is what was packed, and can be used without further checks."""
    vocab_size = metadata["vocab_size"]
    found = content_fingerprint(directory / TOKENS, offsets, vocab_size, metadata["end_token_id"])
    if found != metadata["fingerprint"]:
        raise ValueError(f"{directory / TOKENS} or {OFFSETS} differs from the checksum in {METADATA}.")
    # The checksum tells accidents, the rest what somebody else may have written.
    if offsets[0] != 0 or offsets[-1] != len(tokens):
        raise ValueError(f"{directory / OFFSETS} is damaged: its offsets do not go from 0 to {len(tokens)}.")
    for first in range(0, len(offsets) - 1, _AT_ONCE):
        piece = offsets[first : first + _AT_ONCE + 1]
        if not (piece[1:] > piece[:-1]).all():
            raise ValueError(f"{directory / OFFSETS} is damaged: its offsets do not increase.")
    if vocab_size < 1 << 8 * tokens.itemsize:
        largest = max(int(piece.max()) for piece in _pieces(tokens))
        if largest >= vocab_size:
            raise ValueError(f"{directory / TOKENS} holds token id {largest}; ids must be below {vocab_size}.")


def _stamps(directory: Path) -> dict[str, list[int]]:
    """Facts of the files that change with their content; the change time cannot be set."""
    found = {name: os.stat(directory / name) for name in (TOKENS, OFFSETS, METADATA)}
    return {name: [it.st_size, it.st_mtime_ns, it.st_ctime_ns, it.st_ino] for name, it in found.items()}


def _read_verified(directory: Path) -> Any:
    try:
        return json.loads((directory / _VERIFIED).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _write_verified(directory: Path, stamps: dict[str, list[int]]) -> None:
    with contextlib.suppress(OSError):  # without it, the next use compares again
        write_json(stamps, directory / _VERIFIED)


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[first : first + _AT_ONCE] for first in range(0, len(array), _AT_ONCE))
