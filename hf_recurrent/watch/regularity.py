"""Kinds of lines that come regularly, and silence where one should have come."""

import math
from collections.abc import Container

from hf_recurrent.watch.saved_state import Saved

# Lines of a kind before it counts as regular, and how many times its longest gap is silence.
_LEAST_LINES, _TIMES = 12, 3.0
# The longest gap is one of the last 512 to 1,024 gaps of a kind.
_GENERATION = 512
# Lines between two looks, at most.
_BETWEEN_LOOKS = 256


class Regularity(Saved):
    """Gaps between the lines of each kind, in lines: in a quiet night, nothing is silent.

    Attributes:
        next_look: the next line at which something may become silent.
    """

    __slots__ = ("_gaps", "next_look")

    def __init__(self) -> None:
        # Kind → [lines, last line, longest gap of this and of the last generation, is silent, template].
        self._gaps: dict[int, list[int]] = {}
        self.next_look = 0.0

    def add(self, kinds: tuple[int, int], line: int) -> None:
        """Note a line of these kinds, of which the last one is its template."""
        for kind in kinds:
            gaps = self._gaps.get(kind)
            if gaps is None:
                self._gaps[kind] = [1, line, 0, 0, 0, kinds[1]]
                continue
            gap = line - gaps[1]
            gaps[0] += 1
            gaps[1] = line
            if gap > gaps[2]:
                gaps[2] = gap
            gaps[4] = 0
            if not gaps[0] % _GENERATION:
                gaps[2], gaps[3] = 0, gaps[2]

    def silent(self, line: int) -> tuple[int, float, float] | None:
        """The template of a kind that becomes silent at this line, its longest gap, and how many times that it is."""
        earliest, found = math.inf, None
        for gaps in self._gaps.values():
            if gaps[0] < _LEAST_LINES or gaps[4]:
                continue
            longest = max(gaps[2], gaps[3])
            due = gaps[1] + _TIMES * longest + 1
            if line < due:
                earliest = min(earliest, due)
            elif found is None or found[1] == gaps[1]:  # of the same lines: a template and its only variant
                gaps[4] = 1
                found = found or (gaps[5], gaps[1], longest)
            else:
                earliest = line + 1
        self.next_look = min(earliest, line + _BETWEEN_LOOKS)
        return None if found is None else (found[0], found[2], (line - found[1]) / max(found[2], 1))

    def keep(self, templates: Container[int]) -> None:
        """Forget what belongs to other templates."""
        self._gaps = {kind: gaps for kind, gaps in self._gaps.items() if gaps[5] in templates}
