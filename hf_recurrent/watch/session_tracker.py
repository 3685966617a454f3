"""Sessions of a log: the identifier that makes them, how unusual a finished one is, and those that are open."""

import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_recurrent.watch.saved_state import Saved
from hf_recurrent.watch.slots import BUCKETS, FREQUENT, Order, counted_share
from hf_recurrent.watch.templates import Layout

_COUNT_BUCKETS = 16
_COUNT_PRIOR = 0.5
# Weights of a template that is missing, and of the rarest successor; of a template by its severity.
_ABSENT, _ORDER = 1.3, 0.5
_SEVERE = (1.0, 1.1, 1.3, 1.3, 1.3, 1.5, 1.5)
_NORM = 3
# Templates in fewer sessions than this share may be missing.
_COMMON = 0.2
_BETWEEN_COMMON = 32
# Symbols in place of a template, at the beginning and at the end of a session.
START, _END = -1, -2
_MOST_PAIRS = 100_000


@dataclass(slots=True)
class Session(Saved):
    """The lines with one identifier: the lines of each template, its pairs of successive templates, the last one.

    `time` is of the last line, in seconds.
    """

    first_line: int
    last_line: int
    time: float
    counts: dict[int, int] = field(default_factory=dict)
    pairs: set[tuple[int, int]] = field(default_factory=set)
    last: int = START

    def add(self, template: int, line: int, time: float) -> None:
        self.counts[template] = self.counts.get(template, 0) + 1
        self.pairs.add((self.last, template))
        self.last, self.last_line, self.time = template, line, time


class EndedSession(NamedTuple):
    """A session that has ended, and how unusual it is.

    Args:
        name: the identifier as written in the lines.
        end: `idle`, `full` (too many were open) or `stop`.
        score: norm of the rarities of its parts, in bits.
        kind: `lines` (their number), `missing` (none), `end` (the template ends the session), or `order`.
        template: the most unusual template.
        count: its lines.
    """

    name: bytes
    session: Session
    end: str
    score: float
    kind: str
    template: int
    count: int


class SessionJudge(Saved):
    """Scores finished sessions by what is rare in them among the sessions before.

    Parts of a session are the number of lines of each template, common templates that it lacks, its last template, and
    its rarest successor. The order of lines is only a small part: programs that work side by side write in any order.
    """

    def __init__(self) -> None:
        self.sessions = 0
        self._counts: dict[int, list[int]] = {}
        self._present: Counter[int] = Counter()
        self._last: Counter[int] = Counter()
        self._pairs: Counter[tuple[int, int]] = Counter()
        self._totals: Counter[int] = Counter()
        self._common: list[int] = []

    def judge(self, session: Session, severities: dict[int, int]) -> tuple[float, str, int, int]:
        """Score, kind, template and count, as in [`EndedSession`]; then learn from the session."""
        parts = [
            (self._rarity(self._seen(template, count), _SEVERE[severities.get(template, 0)]), "lines", template, count)
            for template, count in session.counts.items()
        ]
        parts += [
            (self._rarity(self.sessions - self._present[template], _ABSENT), "missing", template, 0)
            for template in self._common
            if template not in session.counts
        ]
        parts.append((self._rarity(self._last[session.last], 1.0), "end", session.last, session.counts[session.last]))
        pairs = session.pairs | {(session.last, _END)}
        rarest = max(pairs, key=lambda pair: (self._pair_rarity(pair), pair))
        parts.append((_ORDER * self._pair_rarity(rarest), "order", rarest[1], session.counts.get(rarest[1], 0)))
        score = sum(part[0] ** _NORM for part in parts) ** (1 / _NORM)
        _, kind, template, count = max(parts)
        self._learn(session, pairs)
        return score, kind, template, count

    def _rarity(self, seen: int, weight: float) -> float:
        return weight * math.log2((self.sessions + 2 * _COUNT_PRIOR) / (seen + _COUNT_PRIOR))

    def _seen(self, template: int, count: int) -> int:
        counts = self._counts.get(template)
        return 0 if counts is None else counts[_bucket(count)]

    def _pair_rarity(self, pair: tuple[int, int]) -> float:
        return math.log2((self._totals[pair[0]] + 2 * _COUNT_PRIOR) / (self._pairs[pair] + _COUNT_PRIOR))

    def _learn(self, session: Session, pairs: set[tuple[int, int]]) -> None:
        for template, count in session.counts.items():
            counts = self._counts.setdefault(template, [0] * _COUNT_BUCKETS)
            counts[_bucket(count)] += 1
            self._present[template] += 1
        self._last[session.last] += 1
        for pair in pairs:
            self._pairs[pair] += 1
            self._totals[pair[0]] += 1
        self.sessions += 1
        if self.sessions < _BETWEEN_COMMON or self.sessions % _BETWEEN_COMMON == 0:
            least = _COMMON * self.sessions
            self._common = [template for template, present in self._present.items() if present >= least]

    def keep(self, templates: Container[int]) -> None:
        """Forget all other templates, and rare pairs if there are too many."""

        def is_kept(template: int) -> bool:
            return template < 0 or template in templates

        for name in ("_counts", "_present", "_last", "_totals"):
            counts = getattr(self, name)
            setattr(self, name, type(counts)({key: value for key, value in counts.items() if is_kept(key)}))
        pairs = {pair: count for pair, count in self._pairs.items() if is_kept(pair[0]) and is_kept(pair[1])}
        if len(pairs) > _MOST_PAIRS:
            pairs = dict(sorted(pairs.items(), key=lambda item: -item[1])[: _MOST_PAIRS // 2])
        self._pairs = Counter(pairs)


def _bucket(count: int) -> int:
    """Bucket of a number of lines: up to 5 each its own, then doubling."""
    return count if count < 6 else min(6 + int(math.log2(count / 6)), _COUNT_BUCKETS - 1)


# Lines after which the kinds are compared, and at most how many identifiers of a kind are followed.
_DECISIONS = (1000, 2000, 4000, 8000, 16000, 32000)
_MOST_KINDS, _MOST_IDENTIFIERS = 32, 20_000
# A kind needs this share of the lines, identifiers, lines for each, and bits gained for each line.
_LEAST_SHARE, _LEAST_IDENTIFIERS, _LEAST_LINES, _LEAST_GAIN = 0.25, 8, 1.5, 0.1
_GAIN_PRIOR = 0.5


class _Kind(Saved):
    """How well the identifiers of a kind explain which template comes next."""

    def __init__(self) -> None:
        self.lines = self.identifiers = 0
        self.gain = 0.0
        self.last: dict[bytes, int] = {}
        # Pairs of templates that followed each other with the same identifier, and with any one of the kind; and how
        # often each template came first.
        self.within: dict[tuple[int, int] | int, int] = {}
        self.across: dict[tuple[int, int] | int, int] = {}
        self.before = START

    def add(self, identifier: bytes, template: int, prior: float) -> None:
        self.lines += 1
        last = self.last.pop(identifier, None)
        if last is None:
            self.identifiers += 1
            last = START
            if len(self.last) >= _MOST_IDENTIFIERS:
                del self.last[next(iter(self.last))]
        self.last[identifier] = template
        before, within, across = self.before, self.within, self.across
        inner, outer = (last, template), (before, template)
        inner_pair, inner_total = within.get(inner, 0), within.get(last, 0)
        outer_pair, outer_total = across.get(outer, 0), across.get(before, 0)
        within[inner], within[last] = inner_pair + 1, inner_total + 1
        across[outer], across[before] = outer_pair + 1, outer_total + 1
        prior *= _GAIN_PRIOR
        self.gain += math.log2(
            (outer_total + _GAIN_PRIOR) * (inner_pair + prior) / ((outer_pair + prior) * (inner_total + _GAIN_PRIOR))
        )
        self.before = template


class SessionFinder(Saved):
    """Chooses the kind of identifier whose lines follow each other most regularly, if there is one.

    A kind gains, for each of its lines, the bits by which the line before it with the same identifier predicts its
    template better than the line before it with any identifier of the kind. Numbers that only look like identifiers
    gain nothing.

    Attributes:
        kind: the chosen kind, or None.
        is_decided: no further line changes it.
    """

    def __init__(self) -> None:
        self.kind: bytes | None = None
        self.is_decided = False
        self._kinds: dict[bytes, _Kind] = {}
        self._templates: set[int] = set()
        self._lines = 0

    def add(self, identifiers: dict[bytes, bytes], template: int) -> bool:
        """Consider a line, given as kind → identifier; True if a kind is chosen now."""
        self._lines += 1
        self._templates.add(template)
        prior = 1 / len(self._templates)
        for kind, identifier in identifiers.items():
            found = self._kinds.get(kind)
            if found is None:
                if len(self._kinds) >= _MOST_KINDS:
                    continue
                found = self._kinds[kind] = _Kind()
            found.add(identifier, template, prior)
        return self._lines in _DECISIONS and self.decide(is_last=self._lines == _DECISIONS[-1])

    def decide(self, *, is_last: bool = False) -> bool:
        """Choose a kind if one is good enough; with `is_last`, no more are considered."""
        good = {kind: found.gain for kind, found in self._kinds.items() if self._is_good(found)}
        if good:
            self.kind = max(good, key=good.__getitem__)
        if good or is_last:
            self.is_decided = True
            self._kinds.clear()
        return bool(good)

    def _is_good(self, found: _Kind) -> bool:
        return (
            found.lines >= _LEAST_SHARE * self._lines
            and found.identifiers >= _LEAST_IDENTIFIERS
            and found.lines >= _LEAST_LINES * found.identifiers
            and found.gain >= _LEAST_GAIN * found.lines
        )


# Open sessions; with more, the one that has been quiet longest ends. And lines that wait for a decision.
MOST_OPEN, _MOST_WAITING = 50_000, 32_000
_PRIOR = 4.0


class SessionTracker(Saved):
    """Follows the sessions of a log.

    Args:
        idle: seconds of the log's time, or lines where it has none, after which a session has ended.
        pattern: finds the identifier; None to find the kind of identifier from the log.

    Attributes:
        ended: the caller takes these.
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
        self.last, highest, template = None, 0.0, layout.template
        names = self._names(line, layout, number, time)
        if not names:
            return 0.0
        for name in names:
            bits, before = self._add(name, template.number, number, time)
            if bits > highest:
                highest, self.last = bits, (name, before)
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

    def _names(self, line: bytes, layout: Layout, number: int, time: float) -> set[bytes]:
        if self.pattern is not None:
            return {match.group(match.lastindex or 0) for match in self.pattern.finditer(line)}
        if not self.finder.is_decided:
            if not layout.identifiers:
                return set()
            names = {kind: line[begin:end] for begin, end, kind in layout.identifiers}
            self._severities[layout.template.number] = layout.template.severity
            self._waiting.append((number, names, layout.template.number, time))
            if self.finder.add(names, layout.template.number):
                self._replay()
            elif self.finder.is_decided or len(self._waiting) > _MOST_WAITING:
                self._waiting.clear()
            return set()
        kind = self.finder.kind
        if kind is None:
            return set()
        if layout.sessions is None:
            layout.sessions = [(begin, end) for begin, end, found in layout.identifiers if found == kind]
        return {line[begin:end] for begin, end in layout.sessions}

    def _replay(self) -> None:
        """Read the lines that have waited for the kind of identifier."""
        for number, names, template, time in self._waiting:
            name = names.get(self.finder.kind)
            if name is not None:
                self._add(name, template, number, time)
                self._end_idle(time)
        self._waiting.clear()

    # ---- Sessions ----

    def _add(self, name: bytes, template: int, number: int, time: float) -> tuple[float, int]:
        """Add a line to a session; returns the bits of its template after the last one, and that one."""
        session = self._open.get(name)
        before = START if session is None else session.last
        bits = self._order(before, template)
        if session is None:
            session = self._open[name] = Session(number, number, time)
            if len(self._open) > MOST_OPEN:
                self._end(next(iter(self._open)), "full")
        else:
            self._open.move_to_end(name)
        session.add(template, number, time)
        return bits, before

    def _end_idle(self, time: float) -> None:
        while self._open:
            name = next(iter(self._open))
            if self._open[name].time + self.idle >= time:
                return
            self._end(name, "idle")

    def _end(self, name: bytes, end: str) -> None:
        session = self._open.pop(name)
        self.ended.append(EndedSession(name, session, end, *self.judge.judge(session, self._severities)))

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
        share = counted_share(order.after_low, total, self._low, self._lines, count, _PRIOR)
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
