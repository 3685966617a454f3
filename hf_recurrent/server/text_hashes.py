"""Hashes of the beginnings of a text, under which states are stored.

A hash covers the tokens and a salt: clients with other salts have other hashes for the same text, so that none of them
can find out what another one sent.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Tokens. A search looks up the hashes at multiples of it; between two of them, only at known lengths.
_BLOCK = 128
_BYTES = 16
_TOKEN = "<u4"


class PrefixKey(NamedTuple):
    """The key of the first tokens of a text."""

    length: int
    block: bytes  # hash of the tokens before the last multiple of the block size
    whole: bytes  # hash of all of them


class TextHashes:
    """Hashes of the beginnings of one text. They never change.

    Args:
        tokens: of the text.
        salt: clients share states only under the same salt.
        ends: lengths after which another text may go on differently, such as the ends of messages.
    """

    def __init__(self, tokens: Sequence[int] | np.ndarray, salt: bytes = b"", ends: Sequence[int] = ()):
        self.ends = tuple(ends)
        self._tokens = np.asarray(tokens)
        self._blocks = [_hash(b"begin", salt)]  # each covers the one before
        self._hash_blocks()

    def __len__(self) -> int:
        return len(self._tokens)

    def followed_by(self, tokens: Sequence[int]) -> "TextHashes":
        """The hashes of a longer text."""
        longer = TextHashes(())
        longer._tokens = np.concatenate([self._tokens, np.asarray(tokens, self._tokens.dtype)])
        longer._blocks = self._blocks.copy()
        longer._hash_blocks()
        return longer

    def key(self, length: int) -> PrefixKey:
        """The key of the first tokens."""
        number = length // _BLOCK
        block, rest = self._blocks[number], self._tokens[number * _BLOCK : length]
        return PrefixKey(length, block, _hash(b"end", block, rest.astype(_TOKEN).tobytes()))

    def blocks(self, length: int) -> Iterator[bytes]:
        """`block` of the keys of the first `length` tokens and of all their beginnings, the longest first."""
        return reversed(self._blocks[: length // _BLOCK + 1])

    def _hash_blocks(self) -> None:
        begin = (len(self._blocks) - 1) * _BLOCK
        data = memoryview(self._tokens[begin:].astype(_TOKEN).tobytes())
        size = _BLOCK * np.dtype(_TOKEN).itemsize
        for offset in range(0, len(data) - size + 1, size):
            self._blocks.append(_hash(b"block", self._blocks[-1], data[offset : offset + size]))


def _hash(kind: bytes, *parts: bytes | memoryview) -> bytes:
    hasher = hashlib.blake2b(digest_size=_BYTES, person=kind)
    for part in parts:
        hasher.update(part)
    return hasher.digest()
