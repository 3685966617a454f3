"""A text as the page shows it: its last bytes, and a curve of bits per byte over all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_SHOWN = 4096  # bytes; older ones are only in the state and the curve
_STEP = 1024  # bytes dropped together, so that the text otherwise only grows at its end
_WIDTH, _MOST_BINS = 32, 256


@dataclass(frozen=True, eq=False)
class SurpriseCurve:
    """Bits per byte along a text of any length, in at most 256 bins.

    Args:
        length: bytes of the text.
        width: bytes of a bin.
        sums: bits of the predicted bytes of each bin.
        counts: predicted bytes of each bin.
        learned: bytes of each bin that the model learned from.
    """

    length: int = 0
    width: int = _WIDTH
    sums: np.ndarray = field(default_factory=lambda: np.zeros(0))
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0))
    learned: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def add(self, bits: Sequence[float], is_learned: bool = False) -> "SurpriseCurve":
        """The curve after more bytes; NaN where nothing was predicted."""
        values = np.asarray(bits, dtype=np.float64)
        known = ~np.isnan(values)
        length, width, bins = self.length + len(values), self.width, (self.sums, self.counts, self.learned)
        while -(-length // width) > _MOST_BINS:
            width *= 2
            bins = tuple(np.pad(part, (0, len(part) % 2)).reshape(-1, 2).sum(1) for part in bins)
        size = -(-length // width)
        places = np.arange(self.length, length) // width
        new = (np.where(known, values, 0.0), known, np.full(len(values), is_learned))
        bins = (
            np.pad(part, (0, size - len(part))) + np.bincount(places, more, size)
            for part, more in zip(bins, new, strict=True)
        )
        return SurpriseCurve(length, width, *bins)

    @property
    def bits_per_byte(self) -> float | None:
        """Over all bytes that were predicted; None if there are none."""
        count = self.counts.sum()
        return float(self.sums.sum() / count) if count else None


@dataclass(frozen=True, eq=False)
class Transcript:
    """The last bytes of a text and their surprise. It never changes, so that marks and forks share it.

    Args:
        data: the bytes.
        bits: of each, NaN where nothing was predicted.
        generated: True where the model wrote the byte.
        curve: over the whole text.
        begins_with: name of the state file that the text continues; None for a new text.
    """

    data: bytes = b""
    bits: np.ndarray = field(default_factory=lambda: np.zeros(0))
    generated: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    curve: SurpriseCurve = field(default_factory=SurpriseCurve)
    begins_with: str | None = None

    def add(
        self, data: bytes, bits: Sequence[float], *, is_generated: bool = False, is_learned: bool = False
    ) -> "Transcript":
        """The transcript after more bytes."""
        drop = max(len(self.data) + len(data) - _SHOWN, 0)
        drop = min(-(-drop // _STEP) * _STEP, len(self.data) + len(data) - 1) if drop else 0
        while drop and drop < len(self.data) and self.data[drop] & 0xC0 == 0x80:  # not within a character
            drop += 1
        generated = np.concatenate([self.generated, np.full(len(data), is_generated)])
        return Transcript(
            (self.data + data)[drop:],
            np.concatenate([self.bits, np.asarray(bits, dtype=np.float64)])[drop:],
            generated[drop:],
            self.curve.add(bits, is_learned),
            self.begins_with,
        )

    @property
    def is_whole(self) -> bool:
        """True if no byte was dropped."""
        return len(self.data) == self.curve.length
