"""The endless order of documents: one pseudo-random permutation of all of them per epoch, in constant memory.

A Feistel network permutes the integers below a power of two; cycle walking (applying it again while the result is
out of range) restricts it to exactly the number of documents (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). Nothing is stored per document, and any position of the order is computed directly.
"""

import numpy as np

_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8


def _mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, a bijection of 64-bit integers (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_integers(*parts: int | np.ndarray) -> np.ndarray:
    """Hash integers or integer arrays that broadcast together: uint64, at least one-dimensional.

    The result is the same on every platform. If all parts but one are fixed, different values of it have different
    hashes.
    """
    result = np.zeros(1, dtype=np.uint64)
    for part in parts:
        part = np.uint64(part % 2**64) if isinstance(part, int) else np.asarray(part).astype(np.uint64)
        result = _mix((result ^ part) + np.uint64(_GOLDEN))
    return result


class DocumentOrder:
    """The endless sequence of documents: each epoch is a pseudo-random permutation of 0..num_documents-1."""

    def __init__(self, num_documents: int, seed: int) -> None:
        self.num_documents = num_documents
        self.seed = seed
        bits = max(2, (num_documents - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        self._low_mask = np.uint64(2 ** (bits // 2) - 1)
        self._high_mask = np.uint64(2 ** (bits - bits // 2) - 1)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """The documents at these positions of the sequence (integers ≥ 0, any shape): int64 of the same shape."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, ranks = np.divmod(positions.ravel(), self.num_documents)
        keys = hash_integers(self.seed, epochs)
        documents = self._network(ranks.astype(np.uint64), keys)
        outside = np.flatnonzero(documents >= self.num_documents)
        while len(outside):
            documents[outside] = self._network(documents[outside], keys[outside])
            outside = outside[documents[outside] >= self.num_documents]
        return documents.astype(np.int64).reshape(positions.shape)

    def _network(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        high, low = values >> self._low_bits, values & self._low_mask
        for number in range(_ROUNDS):
            round_keys = keys + np.uint64(number)
            if number % 2:
                low = low ^ (_mix(_mix(high + np.uint64(_GOLDEN)) ^ round_keys) & self._low_mask)
            else:
                high = high ^ (_mix(_mix(low + np.uint64(_GOLDEN)) ^ round_keys) & self._high_mask)
        return (high << self._low_bits) | low
