"""Measures of scores against labels: AUROC, average precision, precision at a budget, and delay of the first alarm.

Scores are higher for less usual lines; labels are true for anomalous ones. Undefined measures are NaN: the AUROC
without a normal or without an anomalous line, for example.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class EngineResult:
    """Scores of a whole log.

    Args:
        line_scores: one per line, higher for less usual lines.
        line_flags: one per line, true where an alarm was raised.
        sessions: id as it stands in the lines → score; empty if no sessions were found.
        seconds: time of reading the lines.
    """

    line_scores: list[float]
    line_flags: list[bool]
    sessions: dict[str, float]
    seconds: float


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Probability that an anomalous line has a higher score than a normal one; equal scores count half."""
    values, marks = _checked(scores, labels)
    normal, anomalous = np.sort(values[~marks]), values[marks]
    if not len(normal) or not len(anomalous):
        return math.nan
    ranks = np.searchsorted(normal, anomalous, "left") + np.searchsorted(normal, anomalous, "right")
    return float(ranks.mean() / 2 / len(normal))


def average_precision(scores: ArrayLike, labels: ArrayLike) -> float:
    """Mean precision over the anomalous lines, each at the threshold that just includes it."""
    values, marks = _checked(scores, labels)
    if not marks.any():
        return math.nan
    order = np.argsort(-values, kind="stable")
    values, found = values[order], np.cumsum(marks[order])
    last = np.append(values[1:] != values[:-1], True)  # of lines with equal scores
    ranks = np.flatnonzero(last) + 1
    found = found[last]
    return float(np.sum(np.diff(found, prepend=0) * found / ranks) / found[-1])


def highest(scores: ArrayLike, budget: int) -> np.ndarray:
    """Flags of the `budget` highest scores, (lines,) bool; of equal ones, the first."""
    values = np.asarray(scores, dtype=np.float64)
    flags = np.zeros(len(values), dtype=bool)
    flags[np.argsort(-values, kind="stable")[:budget]] = True
    return flags


def precision_at(scores: ArrayLike, labels: ArrayLike, budget: int) -> float:
    """Share of anomalous lines among the `budget` highest scores; of equal ones, the first."""
    values, marks = _checked(scores, labels)
    flags = highest(values, budget)
    return float(marks[flags].mean()) if flags.any() else math.nan


def find_incidents(labels: ArrayLike, gap: int) -> list[tuple[int, int]]:
    """Runs of anomalous lines with at most `gap` normal ones between them: first line, and one after the last."""
    places = np.flatnonzero(np.asarray(labels, dtype=bool))
    if not len(places):
        return []
    borders = np.flatnonzero(np.diff(places) > gap + 1)
    begins = places[np.concatenate([[0], borders + 1])]
    ends = places[np.concatenate([borders, [len(places) - 1]])] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))


@dataclass(frozen=True)
class AlarmDelays:
    """Lines from the beginning of each incident to its first alarm; None for an incident that was missed."""

    delays: tuple[int | None, ...]

    @property
    def share_found(self) -> float:
        """Share of incidents with an alarm."""
        return sum(delay is not None for delay in self.delays) / len(self.delays) if self.delays else math.nan

    @property
    def median(self) -> float:
        """Median delay of the incidents that were found, in lines."""
        found = [delay for delay in self.delays if delay is not None]
        return float(np.median(found)) if found else math.nan


def first_alarm_delay(
    scores: ArrayLike,
    labels: ArrayLike,
    threshold_or_flags: float | Sequence[bool] | np.ndarray,
    incidents: Sequence[tuple[int, int]],
) -> AlarmDelays:
    """Measure how late incidents are noticed.

    Args:
        scores, labels: one per line. An alarm at a normal line within an incident does not count.
        threshold_or_flags: a threshold that the score of a flagged line exceeds, or a flag per line.
        incidents: of [`find_incidents`].
    """
    values, marks = _checked(scores, labels)
    flags = np.asarray(threshold_or_flags)
    flags = values > flags if flags.ndim == 0 else flags.astype(bool)
    if flags.shape != marks.shape:
        raise ValueError(f"`threshold_or_flags` has {len(flags)} flags; `labels` has {len(marks)}.")
    alarms = np.append(np.flatnonzero(flags & marks), len(marks))
    firsts = alarms[np.searchsorted(alarms, [begin for begin, _ in incidents])].tolist()
    return AlarmDelays(
        tuple(first - begin if first < end else None for first, (begin, end) in zip(firsts, incidents, strict=True))
    )


@dataclass(frozen=True)
class Measures:
    """Measures over a range of lines, or of sessions.

    Args:
        count, anomalous: lines or sessions, and how many of them are labelled.
        auroc, average_precision: see the functions.
        precision_at_anomalous: precision at a budget of `anomalous`.
        precision_at_budget: precision at the given budget of alarms, or of the given flags.
        incidents: runs of anomalous lines.
        incidents_found: share of them with an alarm, at the given budget or flags.
        median_delay: lines from the beginning of an incident to its first alarm.
    """

    count: int
    anomalous: int
    auroc: float
    average_precision: float
    precision_at_anomalous: float
    precision_at_budget: float
    incidents: int = 0
    incidents_found: float = math.nan
    median_delay: float = math.nan


def measure(
    scores: ArrayLike,
    labels: ArrayLike,
    *,
    budget: int,
    gap: int | None = None,
    warm_up: int = 0,
    flags: ArrayLike | None = None,
) -> Measures:
    """All measures of scores.

    Args:
        scores, labels: one per line or session.
        budget: number of alarms.
        gap: normal lines within an incident, at most; None where there are no incidents, as for sessions.
        warm_up: lines, or sessions, at the beginning that do not count, nor do incidents that begin in them.
        flags: alarms, in place of the `budget` highest scores.
    """
    values, marks = _checked(scores, labels)
    incidents = [] if gap is None else [range_ for range_ in find_incidents(marks, gap) if range_[0] >= warm_up]
    alarms = np.zeros(len(values), dtype=bool)
    alarms[warm_up:] = highest(values[warm_up:], budget) if flags is None else np.asarray(flags, dtype=bool)[warm_up:]
    delays = first_alarm_delay(values, marks, alarms, incidents)
    precision = float(marks[alarms].mean()) if alarms.any() else math.nan
    values, marks = values[warm_up:], marks[warm_up:]
    anomalous = int(marks.sum())
    return Measures(
        len(values),
        anomalous,
        auroc(values, marks),
        average_precision(values, marks),
        precision_at(values, marks, anomalous),
        precision,
        len(incidents),
        delays.share_found,
        delays.median,
    )


def _checked(scores: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Scores as float64 and labels as bool; a ValueError if one is NaN, or their numbers differ."""
    values, marks = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=bool)
    if values.ndim != 1 or values.shape != marks.shape:
        raise ValueError(f"`scores` has shape {values.shape}, `labels` {marks.shape}; both must be (lines,).")
    if np.isnan(values).any():
        raise ValueError(f"`scores` is NaN at index {int(np.argmax(np.isnan(values)))}.")
    return values, marks
