"""How rare a value is among the recent ones, and the threshold that a stated share of them exceeds."""

import math
from typing import Any

from hf_recurrent.watch.saved_state import Saved

# Lines after which all counts are halved, so that old ones count less.
WINDOW = 1 << 14
# Fewest lines that have rarities and thresholds.
_LEAST = 50
# Step size of the adaptation of a threshold, and bounds of its share, as multiples of the rate.
_GAIN = 0.2
_LOWEST, _HIGHEST = 0.1, 10.0
_BETWEEN_UPDATES = 32
# Bins below a value that are summed rather than the others.
_FEW_BINS = 32
_SCORE_STEP, _SCORE_BINS = 0.0625, 400


class TailHistogram(Saved):
    """Counts of positive values in bins of width `step`; the last one has all higher values.

    Values of zero are not added, but the caller counts their lines. Rarities are multiplied by `weight`.
    """

    __slots__ = ("_last", "_total", "_weight", "counts", "step")

    def __init__(self, step: float = 0.25, bins: int = 64, weight: float = 1.0):
        self.step, self.counts = step, [0.0] * bins
        self._last, self._weight, self._total = bins - 1, weight, 0.0

    def add(self, value: float) -> None:
        index = int(value / self.step)
        self.counts[index if index < self._last else self._last] += 1
        self._total += 1

    def rarity(self, value: float, lines: float) -> float:
        """-log2 of the share of `lines` whose value reached this one, weighted; then the value is added."""
        index = int(value / self.step)
        if index > self._last:
            index = self._last
        counts = self.counts
        counts[index] += 1
        self._total += 1
        reached = self._total - sum(counts[:index]) if index < _FEW_BINS else sum(counts[index:])
        ratio = (lines + 1) / (reached - 0.5)
        return math.log2(ratio) * self._weight if ratio > 1 else 0.0

    def value_above(self, share: float, lines: float) -> float:
        """The smallest value that at most this share of the lines reaches."""
        allowed, above = share * lines, 0.0
        for index in range(len(self.counts) - 1, -1, -1):
            above += self.counts[index]
            if above > allowed:
                return (index + 1) * self.step
        return self.step

    def halve(self) -> None:
        self.counts = [count / 2 for count in self.counts]
        self._total = sum(self.counts)


class AdaptiveThreshold(Saved):
    """The score that lines exceed at a stated rate.

    It is a quantile of recent scores, as in conformal prediction: nothing is assumed about their distribution. The
    share of the quantile adapts: it falls when too many lines are flagged, and rises when too few are (Gibbs and
    Candès 2021, *Adaptive Conformal Inference Under Distribution Shift*).

    The `rate` is the share of the lines to flag while nothing is wrong.
    """

    def __init__(self, rate: float):
        self.rate = self._first_rate = rate
        self.value = math.inf  # the threshold
        self._scores = TailHistogram(_SCORE_STEP, _SCORE_BINS)
        self._lines, self._share, self._until_update = 0.0, rate, _LEAST

    def set_rate(self, rate: float) -> None:
        self._share *= rate / self.rate
        self.rate = rate

    def add(self, score: float) -> bool:
        """True if the score exceeds the threshold; then adapt to it."""
        if score > 0:
            self._scores.add(score)
        self._lines += 1
        is_above = score > self.value
        self._until_update -= 1
        if self._until_update <= 0 or is_above:
            self._update(is_above)
        return is_above

    def _update(self, is_above: bool) -> None:
        passed = _BETWEEN_UPDATES - max(self._until_update, 0)
        share = self._share + _GAIN * self.rate * (self.rate * passed - is_above)
        self._share = min(max(share, _LOWEST * self.rate), _HIGHEST * self.rate)
        self.value = self._scores.value_above(self._share, self._lines)
        self._until_update = _BETWEEN_UPDATES
        if self._lines >= WINDOW:
            self._scores.halve()
            self._lines /= 2

    def set_saved(self, values: dict[str, Any]) -> None:
        """Continue from a saved threshold; a rate that the caller has changed stays."""
        rate = self._first_rate
        super().set_saved(values)
        if rate != self._first_rate:
            self.set_rate(rate)
            self._first_rate = rate
