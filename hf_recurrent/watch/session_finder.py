"""Which identifier of a log makes its sessions: the one that best explains which line comes next."""

import math

from hf_recurrent.watch.saved_state import Saved

# Lines after which the kinds are compared, and at most how many identifiers of a kind are followed.
_DECISIONS = (1000, 2000, 4000, 8000, 16000, 32000)
_MOST_KINDS, _MOST_IDENTIFIERS = 32, 20_000
# A kind needs this share of the lines, identifiers, lines for each, and bits gained for each line.
_LEAST_SHARE, _LEAST_IDENTIFIERS, _LEAST_LINES, _LEAST_GAIN = 0.25, 8, 1.5, 0.1
_PRIOR = 0.5
_START = -1


class _Kind(Saved):
    """How well the identifiers of a kind explain which template comes next.

    Attributes:
        within, across: pairs of templates that followed each other with the same identifier, and with any one of the
            kind; and how often each came first.
    """

    def __init__(self) -> None:
        self.lines = self.identifiers = 0
        self.gain = 0.0
        self.last: dict[bytes, int] = {}
        self.within: dict[tuple[int, int] | int, int] = {}
        self.across: dict[tuple[int, int] | int, int] = {}
        self.before = _START

    def add(self, identifier: bytes, template: int, prior: float) -> None:
        self.lines += 1
        last = self.last.pop(identifier, None)
        if last is None:
            self.identifiers += 1
            last = _START
            if len(self.last) >= _MOST_IDENTIFIERS:
                del self.last[next(iter(self.last))]
        self.last[identifier] = template
        before, within, across = self.before, self.within, self.across
        inner, outer = (last, template), (before, template)
        inner_pair, inner_total = within.get(inner, 0), within.get(last, 0)
        outer_pair, outer_total = across.get(outer, 0), across.get(before, 0)
        within[inner], within[last] = inner_pair + 1, inner_total + 1
        across[outer], across[before] = outer_pair + 1, outer_total + 1
        prior *= _PRIOR
        self.gain += math.log2(
            (outer_total + _PRIOR) * (inner_pair + prior) / ((outer_pair + prior) * (inner_total + _PRIOR))
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
