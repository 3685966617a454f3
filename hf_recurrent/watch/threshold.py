"""`AdaptiveThreshold`: flags a stated share of lines, on any log and also while its model still improves."""

from typing import Any

from hf_recurrent.watch.rarity import RecentValues

# Step size of the adaptation, and bounds of the quantile's share, as multiples of the rate.
_GAIN = 0.2
_LOWEST, _HIGHEST = 0.1, 10.0


class AdaptiveThreshold:
    """The score that lines exceed at a stated rate.

    It is a quantile of the recent scores, as in conformal prediction, so that nothing is assumed about their
    distribution. The share of the quantile adapts: it falls when too many lines are flagged, and rises when too few
    are (Gibbs and Candès 2021, *Adaptive Conformal Inference Under Distribution Shift*).

    Args:
        rate: share of lines to flag.
        window: recent scores.
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
