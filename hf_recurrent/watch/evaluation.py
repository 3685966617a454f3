"""Measures of scores against labels: AUROC, average precision, and precision among the highest.

Scores are higher for less usual lines; labels are true for anomalous ones. Undefined measures are NaN: the AUROC
without a normal or without an anomalous line, for example.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hf_recurrent.watch.log_records import decode_records
from hf_recurrent.watch.watched_log import WatchSettings


@dataclass(frozen=True)
class EngineResult:
    """Scores of a whole log.

    Args:
        line_scores: one per line, higher for less usual lines.
        line_flags: one per line, true where an alarm was raised.
        sessions: id as written in the lines → score; empty if no sessions were found.
        seconds: time of reading the lines.
    """

    line_scores: list[float]
    line_flags: list[bool]
    sessions: dict[str, float]
    seconds: float


def run_engine(lines: Sequence[bytes], settings: WatchSettings | None = None) -> EngineResult:
    """Read the lines in order, once, as `hf-recurrent watch` does; of several records in a line the highest counts."""
    settings = settings or WatchSettings()
    judge, scores, flags = settings.new_judge(), [], []
    begin = time.perf_counter()
    for line in lines:
        records = decode_records(line, settings.format) or ((line, None),)
        reports = [judge.judge(text, when) for text, when in records]
        scores.append(max((report.score for report in reports), default=0.0))
        flags.append(any(report.is_unusual for report in reports))
    judge.tracker.finish()
    seconds = time.perf_counter() - begin
    sessions = {ended.name.decode("utf-8", "surrogateescape"): ended.report.score for ended in judge.tracker.ended}
    return EngineResult(scores, flags, sessions, seconds)


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Probability that an anomalous line has a higher score than a normal one; equal scores count half."""
    values, marks = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    normal, anomalous = np.sort(values[~marks]), values[marks]
    if not len(normal) or not len(anomalous):
        return math.nan
    ranks = np.searchsorted(normal, anomalous, "left") + np.searchsorted(normal, anomalous, "right")
    return float(ranks.mean() / 2 / len(normal))


def average_precision(scores: ArrayLike, labels: ArrayLike) -> float:
    """Mean precision over the anomalous lines, each at the threshold that just includes it."""
    values, marks = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    if not marks.any():
        return math.nan
    order = np.argsort(-values, kind="stable")
    values, found = values[order], np.cumsum(marks[order])
    last = np.append(values[1:] != values[:-1], True)  # of lines with equal scores
    ranks = np.flatnonzero(last) + 1
    found = found[last]
    return float(np.sum(np.diff(found, prepend=0) * found / ranks) / found[-1])


def precision_at(scores: ArrayLike, labels: ArrayLike, budget: int) -> float:
    """Share of anomalous lines among the `budget` highest scores; of equal ones, the first."""
    values, marks = np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
    chosen = marks[np.argsort(-values, kind="stable")[:budget]]
    return float(chosen.mean()) if len(chosen) else math.nan
