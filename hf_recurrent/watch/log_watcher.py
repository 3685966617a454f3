"""`LogWatcher`: reads a log line by line, scores how unusual each line is, and learns from it."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.watch.line_memory import LineMemory
from hf_recurrent.watch.rarity import AdaptiveThreshold, RecentValues

LINE_END = b"\n"
# Measure → length of the windows of neighbouring bytes whose bits are added.
_WINDOWS = {"bytes": 8, "few_bytes": 3}
# Measure → smallest relevant difference: a bit, a fiftieth of the pieces of a line, a fifth of a bit, a quarter line.
_RESOLUTIONS = {"bytes": 1.0, "few_bytes": 1.0, "novelty": 0.02, "order": 0.02, "transition": 0.2, "repetition": 0.25}
# Measure → weight in the norm, if it is not 1; `order` and `transition` measure nearly the same.
_WEIGHTS = {"few_bytes": 1.3, "transition": 1.3, "order": 0.85}
# Power of the norm: 2 lets many small rarities hide a single high one, 4 nearly forgets all but the highest.
_NORM = 3
# A byte with more bits than this is shown as surprising.
_SURPRISING_BITS = 4.0
# A model has diverged if this many lines in a row have more bits per byte than without a model (8).
_DIVERGED_LINES, _DIVERGED_BITS = 20, 12.0


@dataclass(frozen=True)
class WatchSettings:
    """Settings of [`LogWatcher`].

    Args:
        false_alarms: share of lines to flag on a log in which nothing is wrong.
        learn_flagged: learn from lines that were flagged, too.
        window: recent lines to compare a line with.

    Raises:
        ValueError: a value is not allowed.
    """

    false_alarms: float = 0.01
    learn_flagged: bool = False
    window: int = 1000

    def __post_init__(self):
        if not 0 < self.false_alarms < 0.5:
            raise ValueError(f"`false_alarms` is {self.false_alarms}; it must be more than 0 and less than 0.5.")
        if self.window < 1 / self.false_alarms:
            raise ValueError(
                f"`window` is {self.window}; for a rate of false alarms of {self.false_alarms:g} it must be at least "
                f"{math.ceil(1 / self.false_alarms)}."
            )


@dataclass(frozen=True)
class LineReport:
    """How unusual a line is.

    Args:
        bits: surprise of each of the T bytes, the line end included, (T,).
        measures: rarity in bits of each measure among the recent lines: `bytes` and `few_bytes` (the 8 and the 3
            neighbouring bytes with the most bits), and the measures of [`LineMemory.compare`].
        score: weighted norm of order 3 of the measures.
        rarity: of the score among the recent lines, in bits: such a line comes once in 2^rarity lines.
        threshold: of the score; infinite for the first lines.
        is_unusual: the score exceeds the threshold.
    """

    bits: np.ndarray
    measures: Mapping[str, float]
    score: float
    rarity: float
    threshold: float
    is_unusual: bool

    @property
    def reason(self) -> str:
        """Name of the highest measure."""
        return max(self.measures, key=self.measures.__getitem__)

    def surprising(self) -> list[tuple[int, int]]:
        """Begin and end of the stretches of surprising bytes."""
        found: list[tuple[int, int]] = []
        for index in np.flatnonzero(self.bits[:-1] > _SURPRISING_BITS).tolist():
            if found and index - found[-1][1] <= 1:  # a single expected byte between two does not separate them
                found[-1] = (found[-1][0], index + 1)
            else:
                found.append((index, index + 1))
        return found


class LogWatcher:
    """Reads the lines of one log.

    Every line is scored as a whole before the learner reads any of it: the weights change within a line, and scores
    must not depend on where the blocks of learning begin. The learner reads no flagged line, unless the settings say
    so: the line changes neither weights nor state.

    Args:
        learner: an `OnlineLearner` with `binary=True`, because a log may contain any byte.
        settings: of the threshold and of learning.

    Raises:
        ValueError: the learner has `binary=False`.
    """

    def __init__(self, learner: OnlineLearner, settings: WatchSettings):
        if not learner.settings.binary:
            raise ValueError("`learner` has binary=False; it must have binary=True, because a log may have byte 0.")
        self.learner, self.settings = learner, settings
        if not learner.has_context:
            learner.read(LINE_END)
        window = settings.window
        self._measures = {name: RecentValues(window, least) for name, least in _RESOLUTIONS.items()}
        self._memory = LineMemory(window)
        self.threshold = AdaptiveThreshold(settings.false_alarms, window)
        self._bad_lines = 0

    def read(self, line: bytes) -> LineReport:
        """[`judge`] and [`learn`]."""
        report = self.judge(line)
        self.learn(line, report)
        return report

    def judge(self, line: bytes) -> LineReport:
        """Score a line, given without its line end.

        Raises:
            DivergedError: the model predicts worse than no model; the line was not counted. See [`replace_learner`].
        """
        bits = score_line(self.learner, line + LINE_END)
        self._check(bits)
        values = {name: _peak(bits, width) for name, width in _WINDOWS.items()} | self._memory.compare(line)
        measures = {name: self._measures[name].rarity(value) for name, value in values.items()}
        weighted = [_WEIGHTS.get(name, 1.0) * rarity for name, rarity in measures.items()]
        score = sum(value**_NORM for value in weighted) ** (1 / _NORM)
        threshold, rarity = self.threshold.value, self.threshold.scores.rarity(score)
        is_unusual = self.threshold.add(score)
        for name, value in values.items():
            self._measures[name].add(value)
        self._memory.add(line)
        return LineReport(bits, measures, score, rarity, threshold, is_unusual)

    def learn(self, line: bytes, report: LineReport) -> None:
        """Learn from a line after it was judged.

        Raises:
            NonFiniteLossError: the model has diverged. See [`replace_learner`].
        """
        if self.settings.learn_flagged or not report.is_unusual:
            self.learner.read(line + LINE_END)

    def replace_learner(self, learner: OnlineLearner) -> None:
        """Continue with another learner, after the model has diverged."""
        self.learner, self._bad_lines = learner, 0
        if not learner.has_context:
            learner.read(LINE_END)

    def _check(self, bits: np.ndarray) -> None:
        """Raise a DivergedError if the model predicts worse than no model for many lines in a row."""
        finite = bool(np.isfinite(bits).all())
        self._bad_lines = self._bad_lines + 1 if not finite or bits.mean() > _DIVERGED_BITS else 0
        if not finite or self._bad_lines >= _DIVERGED_LINES:
            raise DivergedError("the model predicts worse than no model")

    # ---- Saving ----

    def state(self) -> dict[str, Any]:
        """Everything but the learner, as tensors and numbers, for `save_tree`."""
        return {
            "settings": dataclasses.asdict(self.settings),
            "measures": {name: values.state() for name, values in self._measures.items()},
            "memory": self._memory.state(),
            "threshold": self.threshold.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from [`state`], with the learner that was saved with it; a ValueError if it is damaged."""
        try:
            for name, values in self._measures.items():
                values.load(state["measures"][name])
            self._memory.load(state["memory"])
            self.threshold.load(state["threshold"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the state of the watcher lacks a value: {error}") from error


class DivergedError(Exception):
    """The model predicts worse than no model, or gives NaN."""


def score_line(learner: OnlineLearner, line: bytes) -> np.ndarray:
    """Bits of every byte of a line after the stream so far, (T,) float32; the learner is unchanged.

    Args:
        learner: it has read at least one byte.
        line: T bytes.
    """
    context = learner.context()
    before = context["input_ids"]
    line_ids = torch.tensor([list(line)], device=before.device)
    with torch.no_grad():
        logits = learner.model(torch.cat([before, line_ids[:, :-1]], 1), state=context["state"], use_cache=True).logits
    nats = F.cross_entropy(upcast(logits[0, before.shape[1] - 1 :]), line_ids[0], reduction="none")
    return nats.cpu().numpy() / math.log(2)


def _peak(bits: np.ndarray, width: int) -> float:
    """The highest sum of bits over `width` neighbouring bytes."""
    sums = np.concatenate([[0.0], np.cumsum(bits, dtype=np.float64)])
    width = min(width, len(bits))
    return float((sums[width:] - sums[:-width]).max())
