"""Counts of bytes after their last bytes, in a table of fixed size: the baseline of the examples.

Shape letters: V vocabulary.
"""

import numpy as np

_BYTES = np.arange(256, dtype=np.uint64)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class CountModel:
    """Mixes counts of all contexts up to the longest; the shorter ones fill in for what was never seen.

    Args:
        memory: bytes, one for every count; counts share places where their hashes collide.
        order: length of the longest context.
    """

    def __init__(self, memory: int, order: int = 2):
        self.order, self._counts = order, np.zeros(memory, dtype=np.uint8)
        self._context = b""
        self._look_up()

    def _look_up(self) -> None:
        self._places, self.probabilities = [], np.full(256, 1 / 256)
        for length in range(self.order + 1):
            if length > len(self._context):
                break
            key = int.from_bytes(self._context[len(self._context) - length :], "little") * 4 + length
            places = ((np.uint64(key * 256 + 1) + _BYTES) * _FACTOR >> np.uint64(20)) % np.uint64(len(self._counts))
            counts = self._counts[places].astype(np.float64)
            distinct = 1 + np.count_nonzero(counts)
            # A new byte is as likely as the context had different ones (Witten and Bell, 1991, method C).
            self.probabilities = (counts + distinct * self.probabilities) / (counts.sum() + distinct)
            self._places.append(places)

    def learn(self, byte: int) -> float:
        """Read a byte and count it: its loss before, in nats."""
        loss = -np.log(self.probabilities[byte])
        for places in self._places:
            if self._counts[places[byte]] == 255:
                self._counts[places] //= 2
            self._counts[places[byte]] += 1
        self._context = (self._context + bytes([byte]))[-self.order :]
        self._look_up()
        return float(loss)
