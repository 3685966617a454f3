"""`SessionJudge`: how unusual a finished session is, given the sessions before it."""

import math
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from hf_recurrent.watch.saved_state import Saved

_BUCKETS = 16
_PRIOR = 0.5
# Weights of a template that is missing, and of the rarest successor; of a template by its severity.
_ABSENT, _ORDER = 1.3, 0.5
_SEVERE = (1.0, 1.1, 1.3, 1.3, 1.3, 1.5, 1.5)
_NORM = 3
# Templates in fewer sessions than this share may be missing.
_COMMON = 0.2
_BETWEEN_LOOKS = 32
# Symbols in place of a template, at the beginning and at the end of a session.
START, _END = -1, -2
_MOST_PAIRS = 100_000


@dataclass(slots=True)
class Session(Saved):
    """The lines with one identifier.

    Args:
        first_line, last_line: numbers of lines.
        time: of the last line, in seconds.
        counts: template → lines.
        pairs: template and its successor → times.
        last: the last template.
    """

    first_line: int
    last_line: int
    time: float
    counts: dict[int, int] = field(default_factory=dict)
    pairs: set[tuple[int, int]] = field(default_factory=set)
    last: int = START

    def add(self, template: int, line: int, time: float) -> None:
        """Add a line."""
        self.counts[template] = self.counts.get(template, 0) + 1
        self.pairs.add((self.last, template))
        self.last, self.last_line, self.time = template, line, time


@dataclass(frozen=True)
class SessionReport:
    """How unusual a session is.

    Args:
        score: norm of the rarities of its parts, in bits.
        kind: `lines` (so many of the template), `missing` (none of it), `end` (the template ends it), or `order`.
        template: the most unusual template.
        count: its lines.
    """

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

    def judge(self, session: Session, severities: dict[int, int]) -> SessionReport:
        """Score a session, and learn from it.

        Args:
            severities: template → rank of `severity_of`.
        """
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
        return SessionReport(score, kind, template, count)

    def _rarity(self, seen: int, weight: float) -> float:
        return weight * math.log2((self.sessions + 2 * _PRIOR) / (seen + _PRIOR))

    def _seen(self, template: int, count: int) -> int:
        counts = self._counts.get(template)
        return 0 if counts is None else counts[_bucket(count)]

    def _pair_rarity(self, pair: tuple[int, int]) -> float:
        return math.log2((self._totals[pair[0]] + 2 * _PRIOR) / (self._pairs[pair] + _PRIOR))

    def _learn(self, session: Session, pairs: set[tuple[int, int]]) -> None:
        for template, count in session.counts.items():
            counts = self._counts.setdefault(template, [0] * _BUCKETS)
            counts[_bucket(count)] += 1
            self._present[template] += 1
        self._last[session.last] += 1
        for pair in pairs:
            self._pairs[pair] += 1
            self._totals[pair[0]] += 1
        self.sessions += 1
        if self.sessions < _BETWEEN_LOOKS or self.sessions % _BETWEEN_LOOKS == 0:
            least = _COMMON * self.sessions
            self._common = [template for template, present in self._present.items() if present >= least]

    def keep(self, templates: Container[int]) -> None:
        """Forget all other templates, and rare pairs if there are too many."""

        def is_kept(template: int) -> bool:
            return template < 0 or template in templates

        self._counts = {template: counts for template, counts in self._counts.items() if is_kept(template)}
        self._present = Counter({template: count for template, count in self._present.items() if is_kept(template)})
        self._last = Counter({template: count for template, count in self._last.items() if is_kept(template)})
        self._totals = Counter({template: count for template, count in self._totals.items() if is_kept(template)})
        pairs = {pair: count for pair, count in self._pairs.items() if is_kept(pair[0]) and is_kept(pair[1])}
        if len(pairs) > _MOST_PAIRS:
            pairs = dict(sorted(pairs.items(), key=lambda item: -item[1])[: _MOST_PAIRS // 2])
        self._pairs = Counter(pairs)


def _bucket(count: int) -> int:
    """Bucket of a number of lines: up to 5 each its own, then doubling."""
    return count if count < 6 else min(6 + int(math.log2(count / 6)), _BUCKETS - 1)
