"""`WatchedLog`: a log with its judge, its events, its counts and its speed."""

import json
import math
import re
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from json.encoder import encode_basestring  # type: ignore[attr-defined]
from typing import Any

from hf_recurrent.data.quantities import with_unit
from hf_recurrent.watch.events import IGNORED, Event, EventGrouper, session_event
from hf_recurrent.watch.line_judge import REASONS, REPEATED, LineJudge, LineReport
from hf_recurrent.watch.log_records import decode_records
from hf_recurrent.watch.log_sources import LineBatch, LogSource
from hf_recurrent.watch.redaction import Redactor
from hf_recurrent.watch.session_tracker import EndedSession, SessionTracker
from hf_recurrent.watch.tail_histogram import AdaptiveThreshold

# A log that lags by more seconds than this is reported.
_LAG_SECONDS = 10.0
_COUNTS = ("lines", "unusual", "bytes", "events", "sessions", "unusual_sessions")
_LONGEST_EXAMPLE = 512
_SECONDS_A_DAY = 86_400.0
# Lines between two estimates of the lines in a day.
_BETWEEN_RATES = 1000
# Lines between two looks at what has ended.
_BETWEEN_LOOKS = 16


@dataclass(frozen=True)
class WatchSettings:
    """The arguments of the command about judging, which its help explains; a ValueError if a value is not allowed."""

    false_alarms: float = 0.01
    alarms_per_day: float | None = None
    session: str | None = None
    session_idle: float = 1800.0
    format: str = "auto"

    def __post_init__(self):
        if not 0 < self.false_alarms < 0.5:
            raise ValueError(f"`false_alarms` is {self.false_alarms}; it must be more than 0 and less than 0.5.")
        if self.alarms_per_day is not None and not self.alarms_per_day > 0:
            raise ValueError(f"`alarms_per_day` is {self.alarms_per_day}; it must be more than 0.")
        if not self.session_idle > 0:
            raise ValueError(f"`session_idle` is {self.session_idle}; it must be more than 0 seconds.")
        try:
            re.compile((self.session or "").encode())
        except re.error as error:
            raise ValueError(f"`session` is {self.session!r}, which is not a regular expression: {error}.") from error

    def new_judge(self) -> LineJudge:
        pattern = None if self.session is None else re.compile(self.session.encode())
        return LineJudge(self.false_alarms, SessionTracker(self.session_idle, pattern))


@dataclass
class Findings:
    """Events and records of a batch of lines.

    Args:
        events: those that begin, of lines and of sessions, and ended ones of several lines; in the order of
            lines, each with True if it has ended.
        lines, sessions: JSON lines.
    """

    events: list[tuple[Event, bool]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)


class WatchedLog:
    """A log of a run.

    A redactor removes secrets from its lines before anything else reads them. The records of `Findings` that it
    `makes` are "lines" and "sessions", or one of them.
    """

    def __init__(
        self, source: LogSource, settings: WatchSettings, redactor: Redactor | None, *, makes: Container[str]
    ):
        self.source, self.settings = source, settings
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.judge = settings.new_judge()
        self.grouper = EventGrouper(self.judge)
        self.session_threshold = AdaptiveThreshold(settings.false_alarms)
        self.last_score, self.last_time = 0.0, 0.0
        self.on_line: Callable[[LineReport, float | None], None] | None = None
        self._redactor, self._makes_lines, self._makes_sessions = redactor, "lines" in makes, "sessions" in makes
        self._begin: tuple[int, float] | None = None
        self._seconds, self._worked_bytes, self._is_lagging = 0.0, 0, False

    @property
    def name(self) -> str:
        return self.source.name

    # ---- Reading ----

    def read(self, batch: LineBatch, ignored: Container[str] = ()) -> Findings:
        begin, findings = time.monotonic(), Findings()
        number, offset = batch.number, batch.offset
        redact = None if self._redactor is None else self._redactor.redact
        head = f'{{"log": {json.dumps(self.name, ensure_ascii=False)}, "line_number": '
        for index, content in enumerate(batch.contents):
            for line, when in decode_records(content, self.settings.format) or ((content, None),):
                if redact is not None:
                    line = redact(line)
                report = self.judge.judge(line, when)
                if report.is_unusual:
                    report.is_unusual = self._flag(line, number, report, findings, ignored)
                elif report.reason == REPEATED and report.score:
                    self.grouper.join(number, report)
                if self._makes_lines:
                    record = self._line_record(line, report, batch.cut.get(index))
                    findings.lines.append(f'{head}{number}, "offset": {offset}, {record}')
                if self.on_line is not None:
                    self.on_line(report, self.judge.time)
                report.layout.template.example = line if len(line) <= _LONGEST_EXAMPLE else line[:_LONGEST_EXAMPLE]
                self.last_score = report.score
            number += 1
            offset += batch.lengths[index]
            # By the numbers of lines and not of batches, so that results do not depend on where a run is stopped.
            if self.judge.tracker.ended or not number % _BETWEEN_LOOKS:
                self._end(number, findings)
                self._adapt_rate()
        self.counts["lines"] += len(batch.contents)
        self.counts["bytes"] += offset - batch.offset
        self.last_time = time.time()
        self._seconds += time.monotonic() - begin
        self._worked_bytes += offset - batch.offset
        return findings

    def finish(self) -> Findings:
        """End the sessions and events, because the log has ended."""
        findings = Findings()
        self.judge.tracker.finish()
        self._end(self.source.next_number, findings, everything=True)
        return findings

    def _flag(self, line: bytes, number: int, report: LineReport, findings: Findings, ignored: Container[str]) -> bool:
        """Put a flagged line into an event; False if such events are ignored."""
        event = self.grouper.add(line, number, report, ignored)
        if event is IGNORED:
            return False
        self.counts["unusual"] += 1
        if event is not None:
            self.counts["events"] += 1
            findings.events.append((event, False))
        return True

    def _end(self, number: int, findings: Findings, *, everything: bool = False) -> None:
        """Take the events and sessions that have ended."""
        findings.events += [(event, True) for event in self.grouper.ended(number, everything=everything)]
        tracker = self.judge.tracker
        while tracker.ended:
            ended = tracker.ended.popleft()
            self.counts["sessions"] += 1
            is_unusual = self.session_threshold.add(ended.score)
            event = session_event(ended, self.judge.miner.templates, self.judge.time)
            if self._makes_sessions:
                findings.sessions.append(self._session_record(ended, event, is_unusual))
            if is_unusual:
                self.counts["unusual_sessions"] += 1
                findings.events.append((event, False))

    def _adapt_rate(self) -> None:
        """Set the share of lines to flag from the number of alarms a day, once the lines a day are known."""
        wanted, now = self.settings.alarms_per_day, self.judge.time
        if wanted is None or now is None:
            return
        if self._begin is None:
            self._begin = (self.judge.number, now)
        lines, seconds = self.judge.number - self._begin[0], now - self._begin[1]
        if lines < _BETWEEN_RATES or seconds <= 0:
            return
        rate = wanted / (lines / seconds * _SECONDS_A_DAY)
        self.judge.threshold.set_rate(min(max(rate, 1e-6), 0.4))
        self._begin = (self.judge.number, now)

    # ---- Records ----

    def _line_record(self, line: bytes, report: LineReport, length: int | None) -> str:
        """The JSON of a line after its number and offset."""
        threshold = self.judge.threshold.value
        shown = "null" if threshold == math.inf else f"{threshold:.3f}"
        score, reason = report.score, REASONS[report.reason] if report.score else "usual"
        unusual = "true" if report.is_unusual else "false"
        record = f'"score": {score:.3f}, "threshold": {shown}, "unusual": {unusual}, "reason": "{reason}"'
        if report.span is not None:
            record += f', "span": [{report.span[0]}, {report.span[1]}]'
        if length is not None:
            record += f', "length": {length}'
        text = encode_basestring(line.decode("utf-8", "replace"))
        return f'{record}, "template": {report.layout.template.number}, "text": {text}}}\n'

    def _session_record(self, ended: EndedSession, event: Event, is_unusual: bool) -> str:
        record = {
            "log": self.name,
            "session": ended.name.decode("utf-8", "replace"),
            "score": round(ended.score, 3),
            "unusual": is_unusual,
            "lines": event.count,
            "first_line": ended.session.first_line,
            "last_line": ended.session.last_line,
            "ended": ended.end,
            "reason": event.summary,
        }
        return json.dumps(record, ensure_ascii=False) + "\n"

    # ---- Saving ----

    def state(self) -> dict[str, Any]:
        """JSON for [`load`]."""
        return {
            "name": self.name,
            "position": self.source.position(),
            "counts": self.counts,
            "judge": self.judge.state(),
            "events": self.grouper.state(),
            "session_threshold": self.session_threshold.state(),
            "begin": self._begin,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from [`state`], but for the position, which the source continues; a ValueError if it is damaged."""
        try:
            self.judge.load(state["judge"])
            self.grouper.load(state["events"])
            self.session_threshold.load(state["session_threshold"])
            self.counts.update(state["counts"])
            self._begin = None if state["begin"] is None else tuple(state["begin"])
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the state of the watch lacks a value: {error}") from error

    # ---- Numbers ----

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
        """Numbers of lines, templates, sessions and events, and the speed."""
        counts = self.counts
        words = f"{self.name}: {counts['lines']:,} lines, {len(self.judge.miner.templates):,} templates, "
        if counts["sessions"]:
            words += f"{counts['sessions']:,} sessions, {counts['unusual_sessions']:,} of them unusual, "
        words += f"{counts['unusual']:,} unusual lines in {counts['events']:,} events"
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
            "events": counts["events"] + counts["unusual_sessions"],
            "sessions": counts["sessions"],
            "templates": len(self.judge.miner.templates),
            "score": self.last_score,
            "threshold": self.judge.threshold.value,
            "lag_bytes": self.source.lag(),
            "last_line_timestamp_seconds": self.last_time,
        }
