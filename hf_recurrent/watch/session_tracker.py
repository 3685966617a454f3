"""`SessionTracker`: the open sessions of a log, and reports of those that have ended."""

import math
import re
from collections import OrderedDict, deque
from collections.abc import Container
from dataclasses import dataclass

from hf_recurrent.watch.saved_state import Saved
from hf_recurrent.watch.session_finder import SessionFinder
from hf_recurrent.watch.session_judge import START, Session, SessionJudge, SessionReport
from hf_recurrent.watch.slots import BUCKETS, FREQUENT, Order, rare_share, usual_share
from hf_recurrent.watch.templates import Layout

# Open sessions; with more, the one that has been quiet longest ends. And lines that wait for a decision.
MOST_OPEN, _MOST_WAITING = 50_000, 32_000
_PRIOR = 4.0


@dataclass(slots=True)
class EndedSession:
    """A session that has ended.

    Args:
        name: the identifier as it stands in the lines.
        end: `idle`, `full` (too many were open) or `stop`.
    """

    name: bytes
    session: Session
    report: SessionReport
    end: str


class SessionTracker(Saved):
    """Follows the sessions of a log.

    Args:
        idle: seconds of the log's time, or lines where it has none, after which a session has ended.
        pattern: finds the identifier; None to find the kind of identifier from the log.

    Attributes:
        ended: sessions that have ended; the caller takes them.
        last: name and last template of the session of the line that was read last, or None.
    """

    not_saved = frozenset({"idle", "pattern", "ended", "last"})

    def __init__(self, idle: float = 1800.0, pattern: re.Pattern[bytes] | None = None):
        self.idle, self.pattern = idle, pattern
        self.finder, self.judge = SessionFinder(), SessionJudge()
        self.ended: deque[EndedSession] = deque()
        self.last: tuple[bytes, int] | None = None
        self._open: OrderedDict[bytes, Session] = OrderedDict()
        self._waiting: list[tuple[int, dict[bytes, bytes], int, float]] = []
        self._severities: dict[int, int] = {}
        self._orders: dict[int, Order] = {START: Order()}
        self._totals: dict[int, int] = {}
        self._low = [0.0] * BUCKETS
        self._lines = 0.0

    def read(self, line: bytes, layout: Layout, number: int, time: float) -> float:
        """Add a line to its sessions; returns the bits of surprise at its template after the last one of a session."""
        self.last = None
        names = self._names(line, layout, number, time)
        if not names:
            return 0.0
        template = layout.template
        highest = 0.0
        for name in names:
            session = self._open.get(name)
            before = START if session is None else session.last
            bits = self._order(before, template.number)
            if bits > highest:
                highest, self.last = bits, (name, before)
            self._add(name, session, template.number, number, time)
        self._severities[template.number] = template.severity
        self._end_idle(time)
        return highest

    def finish(self) -> None:
        """End all sessions, because the log has ended."""
        if not self.finder.is_decided and self.pattern is None and self.finder.decide():
            self._replay()
        for name in [*self._open]:
            self._end(name, "stop")

    # ---- Names ----

    def _names(self, line: bytes, layout: Layout, number: int, time: float) -> "list[bytes] | set[bytes]":
        if self.pattern is not None:
            return {match.group(match.lastindex or 0) for match in self.pattern.finditer(line)}
        if not self.finder.is_decided:
            if not layout.identifiers:
                return []
            names = {kind: line[begin:end] for begin, end, kind in layout.identifiers}
            self._severities[layout.template.number] = layout.template.severity
            self._waiting.append((number, names, layout.template.number, time))
            if self.finder.add(names, layout.template.number):
                self._replay()
            elif self.finder.is_decided or len(self._waiting) > _MOST_WAITING:
                self._waiting.clear()
            return []
        kind = self.finder.kind
        if kind is None:
            return []
        spans = layout.sessions
        if spans is None:
            spans = layout.sessions = [(begin, end) for begin, end, found in layout.identifiers if found == kind]
        if len(spans) == 1:
            begin, end = spans[0]
            return [line[begin:end]]
        return {line[begin:end] for begin, end in spans}

    def _replay(self) -> None:
        """Read the lines that have waited for the kind of identifier."""
        for number, names, template, time in self._waiting:
            name = names.get(self.finder.kind)
            if name is not None:
                session = self._open.get(name)
                self._order(START if session is None else session.last, template)
                self._add(name, session, template, number, time)
                self._end_idle(time)
        self._waiting.clear()

    # ---- Sessions ----

    def _add(self, name: bytes, session: Session | None, template: int, number: int, time: float) -> None:
        if session is None:
            session = self._open[name] = Session(number, number, time)
            if len(self._open) > MOST_OPEN:
                self._end(next(iter(self._open)), "full")
        else:
            self._open.move_to_end(name)
        session.add(template, number, time)

    def _end_idle(self, time: float) -> None:
        while self._open:
            name = next(iter(self._open))
            if self._open[name].time + self.idle >= time:
                return
            self._end(name, "idle")

    def _end(self, name: bytes, end: str) -> None:
        session = self._open.pop(name)
        self.ended.append(EndedSession(name, session, self.judge.judge(session, self._severities), end))

    def _order(self, before: int, template: int) -> float:
        """Bits of a template after another one of a session."""
        order = self._orders.get(before)
        if order is None:
            order = self._orders[before] = Order()
        total = self._totals.get(before, 0)
        self._totals[before] = total + 1
        self._lines += 1
        count = order.after.get(template, 0)
        if count >= FREQUENT:
            order.after[template] = count + 1
            return 0.0
        bucket, low = count.bit_length(), self._low
        share = rare_share(order.after_low, total, usual_share(low, self._lines, bucket), bucket, _PRIOR)
        order.after_low[bucket] += 1
        low[bucket] += 1
        order.add(template, count)
        return -math.log2(share) if share < 1 else 0.0

    def usual_after(self, before: int) -> tuple[int, float] | None:
        """The most usual template after another one of a session, and its share."""
        order = self._orders.get(before)
        return None if order is None else order.usual(self._totals.get(before, 0))

    def keep(self, templates: Container[int]) -> None:
        """Forget all other templates."""
        kept = {number for number in self._orders if number == START or number in templates}
        self._orders = {number: self._orders[number] for number in kept}
        self._totals = {number: count for number, count in self._totals.items() if number in kept}
        self._severities = {number: rank for number, rank in self._severities.items() if number in templates}
        self.judge.keep(templates)
