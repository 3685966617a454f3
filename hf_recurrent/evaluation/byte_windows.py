"""Windows of bytes that occur again: in a document, and in training text.

Windows are compared by hashes of 64 bits, so a wrong match is practically impossible.

Shape letters: T bytes of a document.
"""

import numpy as np

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def window_hashes(data: bytes, length: int) -> np.ndarray:
    """Hash of each window of `length` bytes: (T - length + 1,) uint64, of those that begin at 0, 1, …"""
    values = np.frombuffer(data, np.uint8).astype(np.uint64) + np.uint64(1)
    count = max(len(values) - length + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for offset in range(length):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * _FACTOR + values[offset : offset + count]
    return hashes


def is_repeated(hashes: np.ndarray) -> np.ndarray:
    """True for each window that is equal to an earlier one."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return first[inverse] < np.arange(len(hashes))


class KnownWindows:
    """The windows of `length` bytes of a text."""

    def __init__(self, data: bytes, length: int) -> None:
        self.length = length
        self._hashes = np.unique(window_hashes(data, length))

    def contains(self, hashes: np.ndarray) -> np.ndarray:
        """True for each window that occurs in the text."""
        if not len(self._hashes):
            return np.zeros(len(hashes), dtype=bool)
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return self._hashes[places] == hashes
