"""`WatchedLog`: a log with its watcher, its counts and its speed."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_recurrent.data.episode_source import with_unit
from hf_recurrent.learning_rules.rules import NonFiniteLossError
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.watch.journal import journal_text
from hf_recurrent.watch.log_lines import LogLine
from hf_recurrent.watch.log_sources import LogSource
from hf_recurrent.watch.log_watcher import DivergedError, LineReport, LogWatcher

# A log that lags by more seconds than this is reported.
_LAG_SECONDS = 10.0
_COUNTS = ("lines", "unusual", "bytes", "bits", "reverts")


@dataclass
class WatchedLog:
    """A log of a run.

    Args:
        source: of its lines.
        watcher: reads them.
        folder: of its learner, in checkpoints.
        parses_journal: lines that are JSON of journalctl are read as `program: message`.
    """

    source: LogSource
    watcher: LogWatcher
    folder: str
    parses_journal: bool = True
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTS, 0))
    last_score: float = 0.0
    last_time: float = 0.0
    _seconds: float = 0.0
    _worked_bytes: int = 0
    _is_lagging: bool = False

    @property
    def name(self) -> str:
        """The name of the source."""
        return self.source.name

    def read(self, line: LogLine, checkpoint: Path) -> tuple[bytes, LineReport]:
        """Judge a line and learn from it; returns its content and the report.

        If the model diverges, it goes back to its weights in `checkpoint`, and a notice of the source says so.

        Raises:
            DivergedError: these weights have diverged too.
        """
        begin = time.monotonic()
        content = line.content.removesuffix(b"\r")
        if self.parses_journal and (text := journal_text(content)) is not None:
            content = text
        try:
            report = self.watcher.judge(content)
        except DivergedError as error:
            self._revert(checkpoint, line, error)
            report = self.watcher.judge(content)
        try:
            self.watcher.learn(content, report)
        except NonFiniteLossError as error:
            self._revert(checkpoint, line, error)
        self.last_score, self.last_time = report.score, time.time()
        self.counts["lines"] += 1
        self.counts["unusual"] += report.is_unusual
        self.counts["bytes"] += line.length
        self.counts["bits"] += float(report.bits.sum())
        self._seconds += time.monotonic() - begin
        self._worked_bytes += len(content) + 1
        return content, report

    def _revert(self, checkpoint: Path, line: LogLine, error: Exception) -> None:
        """Go back to the weights of a checkpoint, at half the learning rate."""
        rate = self.watcher.learner.settings.learning_rate / 2
        self.watcher.replace_learner(OnlineLearner.load(checkpoint / self.folder, learning_rate=rate))
        self.counts["reverts"] += 1
        self.source.notices.append(
            f"{self.name}, line {line.number:,}: the model diverged: {str(error).rstrip('.')}; back to {checkpoint} "
            f"with learning rate {rate:g}. No line is lost"
        )

    def state(self) -> dict[str, Any]:
        """Everything but the learner, for `save_tree`."""
        return {
            "name": self.name,
            "folder": self.folder,
            "watcher": self.watcher.state(),
            "position": self.source.position(),
            "counts": self.counts,
        }

    def check_lag(self) -> str | None:
        """A message if the log lags, or has just been read up to its end again."""
        speed = self._worked_bytes / self._seconds if self._seconds else 0.0
        lag, was_lagging = self.source.lag(), self._is_lagging
        self._is_lagging = bool(speed) and lag > _LAG_SECONDS * speed
        self._seconds, self._worked_bytes = self._seconds / 2, self._worked_bytes // 2  # older speeds count less
        if self._is_lagging:
            return (
                f"{self.name}: {with_unit(lag, 'B')} still to read, {lag / speed:,.0f} s at {with_unit(speed, 'B/s')}"
            )
        return f"{self.name} is read up to its end again" if was_lagging else None

    def summary(self) -> str:
        """Numbers of lines, bits per byte and speed."""
        counts = self.counts
        words = f"{self.name}: {counts['lines']:,.0f} lines, {counts['unusual']:,.0f} unusual"
        if counts["bytes"]:
            words += f", {counts['bits'] / (counts['bytes'] + counts['lines']):.2f} bits per byte"
        if self._seconds:
            words += f", {with_unit(self._worked_bytes / self._seconds, 'B/s')}"
        return words

    def metrics(self) -> dict[str, float]:
        """Name in [`METRICS`] → value."""
        counts = self.counts
        return {
            "lines": counts["lines"],
            "unusual_lines": counts["unusual"],
            "bytes": counts["bytes"],
            "bits": counts["bits"],
            "score": self.last_score,
            "threshold": self.watcher.threshold.value,
            "lag_bytes": self.source.lag(),
            "last_line_timestamp_seconds": self.last_time,
            "reverts": counts["reverts"],
        }
