"""Rarity of a value among recent ones, and the threshold that a stated share of them exceeds."""

import math
from typing import Any

import numpy as np
import torch

# The tail, taken as exponential, is this share of the recent values, but not fewer than this number.
_TAIL_SHARE, _TAIL_LEAST = 0.1, 5
# Fewest values of a window that has rarities and quantiles.
_LEAST = 50
# The tail is extrapolated to values that come once in this many windows.
_BEYOND = 10
# Step size of the threshold's adaptation, and bounds of the quantile's share, as multiples of the rate.
_GAIN = 0.2
_LOWEST, _HIGHEST = 0.1, 10.0


class RecentValues:
    """The last `size` values, against which new ones are ranked.

    The tail has at least the scale `resolution`, so that small differences between nearly equal values are not rare.
    """

    def __init__(self, size: int, resolution: float = 1e-9):
        self._values = np.zeros(0)
        self._size, self._resolution = size, resolution

    def add(self, value: float) -> None:
        """Put a value into the window."""
        self._values = np.append(self._values, value)[-self._size :]

    def rarity(self, value: float) -> float:
        """-log2 of the share of values that reach this one, in bits; 0 while the window has fewer than 50 values.

        The rank alone gives the p-value of conformal prediction, which holds for any distribution; an exponential tail
        continues it beyond the highest values of the window, up to what comes once in ten times as many.
        """
        count = len(self._values)
        if count < _LEAST:
            return 0.0
        begin, scale, share = self._tail()
        if value <= begin:
            return math.log2((count + 1) / (1 + int((self._values >= value).sum())))
        beyond = -math.log2(share) + (value - begin) / scale / math.log(2)
        return min(beyond, math.log2(_BEYOND * (count + 1)))

    def quantile(self, rate: float) -> float:
        """The value that is exceeded at most at this rate; infinite while the window has fewer than 50 values.

        A quantile of the window if it has 1 / `rate` values, else one of the exponential tail.
        """
        count = len(self._values)
        if count < _LEAST:
            return math.inf
        rank = math.ceil((count + 1) * (1 - rate))
        if rank <= count:
            return float(np.partition(self._values, rank - 1)[rank - 1])
        begin, scale, share = self._tail()
        return begin + scale * math.log(share / rate)

    def _tail(self) -> tuple[float, float, float]:
        """Begin and scale of the tail, and its share of the values."""
        count = len(self._values)
        size = max(int(count * _TAIL_SHARE), _TAIL_LEAST)
        tail = np.partition(self._values, count - size)[count - size :]
        begin = float(tail.min())
        return begin, max(float((tail - begin).mean()), self._resolution), (1 + size) / (count + 1)

    def state(self) -> torch.Tensor:
        """The values, float64."""
        return torch.from_numpy(self._values.copy())

    def load(self, state: torch.Tensor) -> None:
        """Continue from the values of [`state`]; a ValueError if they are damaged."""
        if state.dtype != torch.float64 or state.dim() != 1 or not bool(state.isfinite().all()):
            raise ValueError("a window of recent values is not a vector of finite float64 numbers.")
        self._values = state.numpy().copy()[-self._size :]


class AdaptiveThreshold:
    """The score that lines exceed at a stated rate.

    It is a quantile of the recent scores, as in conformal prediction, so that nothing is assumed about their
    distribution. The share of the quantile adapts: it falls when too many lines are flagged, and rises when too few
    are (Gibbs and Candès 2021, *Adaptive Conformal Inference Under Distribution Shift*).
    """

    def __init__(self, rate: float, window: int):
        self.rate = rate
        self.scores = RecentValues(window)
        self._share = rate

    @property
    def value(self) -> float:
        """The threshold; infinite for the first 50 lines."""
        return self.scores.quantile(self._share)

    def add(self, score: float) -> bool:
        """True if the score exceeds the threshold; then adapt to it."""
        is_above = score > self.value
        share = self._share + _GAIN * self.rate * (self.rate - is_above)
        self._share = min(max(share, _LOWEST * self.rate), _HIGHEST * self.rate)
        self.scores.add(score)
        return is_above

    def state(self) -> dict[str, Any]:
        """Everything for [`load`], as tensors and numbers."""
        return {"scores": self.scores.state(), "share": self._share}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from [`state`]."""
        self.scores.load(state["scores"])
        self._share = min(max(float(state["share"]), _LOWEST * self.rate), _HIGHEST * self.rate)
