"""Counts of bytes after their last bytes, in bounded memory: the baseline of the examples."""

import numpy as np

_ENTRY = 6  # bytes of a count in a table: context and byte 4, count 2
_MOST = 65_535


class CountModel:
    """Mixes counts of all contexts up to the longest; the shorter ones fill in for what was never seen.

    Args:
        memory: bytes, six for every context with one of its successors. When it is full, all counts are halved.
        order: length of the longest context.
    """

    def __init__(self, memory: int, order: int = 2):
        self.order, self._room = order, memory // _ENTRY
        self._counts: dict[bytes, np.ndarray] = {}
        self._context, self._used = b"", 0
        self._look_up()

    def _look_up(self) -> None:
        self._rows, self.probabilities = [], np.full(256, 1 / 256)
        for length in range(min(self.order, len(self._context)) + 1):
            context = self._context[len(self._context) - length :]
            row = self._counts.get(context)
            self._rows.append((context, row))
            if row is not None:
                distinct = np.count_nonzero(row)
                # A new byte is as likely as the context had different ones (Witten and Bell, 1991, method C).
                self.probabilities = (row + distinct * self.probabilities) / (row.sum() + distinct)

    def learn(self, byte: int) -> float:
        """Read a byte and count it: its loss before, in nats."""
        loss, full = -np.log(self.probabilities[byte]), False
        for context, row in self._rows:
            if row is None:
                row = self._counts[context] = np.zeros(256)
            self._used += row[byte] == 0
            row[byte] += 1
            full |= self._used > self._room or row[byte] > _MOST
        if full:
            self._halve()
        self._context = (self._context + bytes([byte]))[-self.order :]
        self._look_up()
        return float(loss)

    def _halve(self) -> None:
        halves = {context: row // 2 for context, row in self._counts.items()}
        self._counts = {context: row for context, row in halves.items() if row.any()}
        self._used = sum(np.count_nonzero(row) for row in self._counts.values())
