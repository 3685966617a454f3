"""`EventGrouper`: flagged lines become events, one for a burst of alike ones, and sentences that say why."""

import hashlib
import json
import os
import re
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_recurrent.data.quantities import count_of
from hf_recurrent.watch.line_judge import (
    FREQUENT_HERE,
    NEW,
    ORDER,
    REASONS,
    REPEATED,
    SEVERITY,
    SILENCE,
    VALUE,
    LineJudge,
    LineReport,
)
from hf_recurrent.watch.saved_state import Saved
from hf_recurrent.watch.session_tracker import EndedSession
from hf_recurrent.watch.severity import LEVELS
from hf_recurrent.watch.templates import Template

# Open events, and lines and seconds without an alike line after which one ends.
_MOST_OPEN, _QUIET_LINES, _QUIET_SECONDS = 256, 1000, 600.0
_LONGEST_NAME = 100


@dataclass(slots=True)
class Event(Saved):
    """Flagged lines of a template for one reason.

    Args:
        id: hash of reason and template: the same in every run, for `watch ignore`.
        reason: one of `REASONS`, or `session`.
        summary: a sentence that says what is unusual.
        score, text, span: of the first line; begin and end of the rare value in it, or None.
        first_time, last_time: seconds since 1970, or None.
        nearest: line of the nearest kind that came before, or None.
        count: lines.
    """

    id: str
    reason: str
    summary: str
    score: float
    first_line: int
    last_line: int
    first_time: float | None
    last_time: float | None
    text: bytes
    span: tuple[int, int] | None = None
    nearest: bytes | None = None
    count: int = 1
    details: dict[str, Any] = field(default_factory=dict)

    def record(self, log: str, *, has_ended: bool = False) -> dict[str, Any]:
        """JSON of the event, as it begins or with the lines that it got."""
        record: dict[str, Any] = {
            "log": log,
            "event": self.id,
            "reason": self.reason,
            "summary": self.summary,
            "score": round(self.score, 3),
            "line_number": self.first_line,
            "time": self.first_time,
            "text": self.text.decode("utf-8", "replace"),
            **self.details,
        }
        if self.span is not None:
            record["span"] = self.span
        if self.nearest is not None:
            record["nearest"] = self.nearest.decode("utf-8", "replace")
        if has_ended:
            record |= {"ended": True, "last_line": self.last_line, "last_time": self.last_time, "count": self.count}
        return record


# In place of an event that is ignored.
IGNORED = Event("", "", "", 0.0, 0, 0, None, None, b"")


class EventGrouper(Saved):
    not_saved = frozenset({"judge"})

    def __init__(self, judge: LineJudge):
        self.judge = judge
        self._open: OrderedDict[tuple[int, int], Event] = OrderedDict()

    def add(self, line: bytes, number: int, report: LineReport, ignored: Container[str]) -> Event | None:
        """An event that begins with a line just judged; None if it belongs to an open one; `IGNORED`."""
        template = report.layout.template
        about = template
        if report.reason == SILENCE and self.judge.silence is not None:
            about = self.judge.miner.templates.get(self.judge.silence[0], template)
        if self.join(number, report, about):
            return None
        name, time = _hash(REASONS[report.reason], about.text()), self.judge.time
        if name in ignored:
            return IGNORED
        summary, nearest = self._summary(line, report, about), self._nearest(template)
        event = Event(name, REASONS[report.reason], summary, report.score, number, number, time, time, line)
        event.span, event.nearest = report.span, nearest
        self._open[report.reason, about.number] = event
        return event

    def join(self, number: int, report: LineReport, about: Template | None = None) -> bool:
        """Add a line to the open event of its reason and template; False if there is none."""
        key = report.reason, (about or report.layout.template).number
        known = self._open.get(key)
        if known is None:
            return False
        known.count += 1
        known.last_line, known.last_time = number, self.judge.time
        self._open.move_to_end(key)
        return True

    def ended(self, number: int, *, everything: bool = False) -> list[Event]:
        """Events of several lines to which none was added for long."""
        found, time = [], self.judge.time
        while self._open:
            event = next(iter(self._open.values()))
            is_quiet = number - event.last_line > _QUIET_LINES or (
                time is not None and event.last_time is not None and time - event.last_time > _QUIET_SECONDS
            )
            if not (is_quiet or everything or len(self._open) > _MOST_OPEN):
                break
            self._open.popitem(last=False)
            if event.count > 1:
                found.append(event)
        return found

    # ---- Sentences ----

    def _summary(self, line: bytes, report: LineReport, about: Template) -> str:
        template, reason = report.layout.template, report.reason
        if reason == NEW:
            if template.count == 1:
                return "new template"
            if report.layout.variant.count == 1:
                return f"new words in a known line: {shown(about)}"
            return f"rare, {template.count} lines so far: {shown(about)}"
        if reason == VALUE:
            begin, end = report.span or (0, len(line))
            return f"rare value {line[begin:end].decode('utf-8', 'replace')[:_LONGEST_NAME]} in {shown(about)}"
        if reason == ORDER:
            return self._order(template)
        if reason == REPEATED:
            return f"the same line again and again: {shown(about)}"
        if reason == FREQUENT_HERE:
            return f"more often than usual: {shown(about)}"
        if reason == SEVERITY:
            return f"{LEVELS[template.severity]}, which is rare here: {shown(about)}"
        lines, times = (self.judge.silence or (0, 0.0, 0.0))[1:]
        return f"silent for {lines * times:,.0f} lines, usually at most {lines:,.0f}: {shown(about)}"

    def _order(self, template: Template) -> str:
        """Expected X after Y, got Z: in the session of the line, or in the whole log."""
        judge, tracker = self.judge, self.judge.tracker
        templates = judge.miner.templates
        if tracker.last is not None and judge.session_is_rarer:
            name, before = tracker.last
            place = f"in session {name.decode('utf-8', 'replace')[:_LONGEST_NAME]}, "
            usual = tracker.usual_after(before)
            last = templates.get(before)
            after = "at its beginning" if last is None else f"after {shown(last)}"
        else:
            place, last = "", judge.previous.template if judge.previous is not None else None
            usual, after = (None, "") if last is None else (last.order.usual(last.count), f"after {shown(last)}")
        if usual is None or usual[0] not in templates or usual[0] == template.number:
            return f"{place}unexpected {after}: {shown(template)}"
        expected = shown(templates[usual[0]])
        return f"{place}{after} expected {expected} ({usual[1]:.0%}), got {shown(template)}"

    def _nearest(self, template: Template) -> bytes | None:
        """The last line of the template before this one; for a new one, of the template that shares most words."""
        if template.example is not None:
            return template.example
        words, best, most = set(template.tokens), None, 0
        for other in self.judge.miner.templates.values():
            if other is not template and other.example is not None:
                shared = len(words.intersection(other.tokens))
                if shared > most:
                    best, most = other, shared
        return None if best is None else best.example


def session_event(ended: EndedSession, templates: dict[int, Template], time: float | None) -> Event:
    session, template = ended.session, templates.get(ended.template)
    name = "a template that is forgotten" if template is None else shown(template)
    what = {
        "lines": f"{ended.count} times {name}",
        "missing": f"no {name}",
        "end": f"ends with {name}",
        "order": f"unusual order at {name}",
    }[ended.kind]
    identifier = ended.name.decode("utf-8", "replace")
    lines = sum(session.counts.values())
    summary = f"session {identifier[:_LONGEST_NAME]}, {count_of(lines, 'line')}: {what}"
    event_id = _hash("session", ended.kind, "" if template is None else template.text())
    places = session.first_line, session.last_line, time, time
    details = {"session": identifier}
    return Event(event_id, "session", summary, ended.score, *places, ended.name, count=lines, details=details)


def _hash(*parts: str) -> str:
    """Eight hexadecimal digits, such as the ID of a reason and a template."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def shown(template: Template) -> str:
    """A template in quotes, without the time at its beginning, and shortened."""
    text = template.text().removeprefix("<time> ")
    return f"`{text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + '…'}`"


_FILE = "ignored.jsonl"
_ID = re.compile(r"[0-9a-f]{8}")


class IgnoredEvents:
    """Ids of the events that a person has called usual, in a directory of saved state."""

    def __init__(self, directory: Path):
        self._path = directory / _FILE
        self._ids: set[str] = set()
        self._size = -1
        self.look()

    def __contains__(self, event: object) -> bool:
        return event in self._ids

    def look(self) -> None:
        """Read the file if it has grown."""
        try:
            size = self._path.stat().st_size
        except OSError:
            size = 0
        if size == self._size:
            return
        self._size, self._ids = size, set()
        if size:
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    self._ids.add(json.loads(line)["event"])
                except (ValueError, KeyError, TypeError):
                    continue

    def add(self, event: str) -> None:
        """Ignore an event from now on; raise a ValueError if it is not the id of one."""
        if not _ID.fullmatch(event):
            raise ValueError(f"`ID` is {event!r}; it must be the 8 digits and letters in brackets after an event.")
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event}) + "\n")
            file.flush()
            os.fsync(file.fileno())
