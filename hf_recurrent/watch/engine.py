"""Scores of a whole log at once, for evaluations."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hf_recurrent.watch.log_records import RecordDecoder
from hf_recurrent.watch.watched_log import WatchSettings


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


def run_engine(lines: Sequence[bytes], settings: WatchSettings | None = None) -> EngineResult:
    """Read the lines in order, once, as `hf-recurrent watch` does; of several records in a line the highest counts."""
    settings = settings or WatchSettings()
    judge, decode = settings.new_judge(), RecordDecoder(settings.format).decode
    scores, flags = [], []
    begin = time.perf_counter()
    for line in lines:
        records = decode(line)
        if records is None:
            report = judge.judge(line)
            scores.append(report.score)
            flags.append(report.is_unusual)
            continue
        reports = [judge.judge(text, when) for text, when in records]
        scores.append(max((report.score for report in reports), default=0.0))
        flags.append(any(report.is_unusual for report in reports))
    judge.tracker.finish()
    seconds = time.perf_counter() - begin
    sessions = {ended.name.decode("utf-8", "surrogateescape"): ended.report.score for ended in judge.tracker.ended}
    return EngineResult(scores, flags, sessions, seconds)
