"""Random numbers of examples, independent of the order of draws.

With NumPy's generators a number depends on all earlier draws. Here it is a pure function (a hash) of seed, split,
index of the example, purpose and position: examples are the same one by one, in batches, in workers and after a
restart; examples of integers also on every platform.
"""

import zlib
from collections.abc import Collection

import numpy as np

from hf_recurrent.data.document_order import hash_integers

SPLITS = ("train", "validation", "test")


def check_split(split: str, splits: Collection[str] = SPLITS) -> str:
    """Return `split` if it is one of `splits`, else raise a ValueError."""
    if split not in splits:
        raise ValueError(f"`split` is {split!r}; it must be one of {', '.join(splits)}.")
    return split


class ExampleDraws:
    """The random numbers of B examples.

    Args:
        seed: any integer.
        split: examples of different splits are independent.
        indices: (B,) integers of at least 0, the numbers of the examples.

    Raises:
        ValueError: an unknown split, or indices of another shape or type or below 0.
    """

    def __init__(self, seed: int, split: str, indices: np.ndarray) -> None:
        indices = np.asarray(indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or (len(indices) and indices.min() < 0):
            raise ValueError(f"`indices` is {indices.dtype} {indices.shape}; it must be (B,) integers of at least 0.")
        self.num_examples, self.split = len(indices), check_split(split)
        self._keys = hash_integers(int(seed), SPLITS.index(split), indices)[:, None]

    def words(self, purpose: str, count: int, first: int = 0) -> np.ndarray:
        """(B, count) uint64, all bits random: the numbers `first`, `first` + 1, … of a purpose."""
        return hash_integers(self._keys, zlib.crc32(purpose.encode()), np.arange(first, first + count)[None])

    def integers(self, purpose: str, count: int, bound: int) -> np.ndarray:
        """(B, count) int64, uniform in 0..bound-1."""
        return (self.words(purpose, count) % np.uint64(bound)).astype(np.int64)

    def uniform(self, purpose: str, count: int) -> np.ndarray:
        """(B, count) float64, uniform in [0, 1)."""
        return (self.words(purpose, count) >> np.uint64(11)) * 2.0**-53

    def normal(self, purpose: str, count: int) -> np.ndarray:
        """(B, count) float64, standard normal (Box and Muller, 1958)."""
        radius = np.sqrt(-2 * np.log1p(-self.uniform(f"{purpose} radius", count)))
        return radius * np.cos(2 * np.pi * self.uniform(f"{purpose} angle", count))

    def choose(self, purpose: str, size: int, count: int) -> np.ndarray:
        """(B, count) int64: different numbers below `size`, in ascending order."""
        if count == size:
            return np.broadcast_to(np.arange(size), (self.num_examples, size))
        smallest = np.argpartition(self.words(purpose, size), count, axis=1)[:, :count]
        return np.sort(smallest, axis=1)

    def permutation(self, purpose: str, size: int) -> np.ndarray:
        """(B, size) int64: 0..size-1 in random order."""
        return np.argsort(self.words(purpose, size), axis=1)
