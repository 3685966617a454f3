"""Templates that come regularly, and silence where one should have come."""

import math
from typing import Any

# Lines of a template before it counts as regular, how many times its longest gap is silence, and how fast a long gap
# is forgotten with each line.
_LEAST_LINES, _TIMES, _DECAY = 12, 3.0, 0.98


class Regularity:
    """Gaps between the lines of each template, in lines and in seconds.

    A template is silent if it has not come for three times its longest recent gap, both in lines and, if the lines
    have times, in seconds: in the night everything is rare.
    """

    __slots__ = ("_gaps", "_next_look")

    def __init__(self) -> None:
        # Template → [lines, last line, longest gap in lines, last time, longest gap in seconds, is silent].
        self._gaps: dict[int, list[float]] = {}
        self._next_look = 0.0

    def add(self, template: int, line: int, time: float | None) -> None:
        """Note a line of a template."""
        gaps = self._gaps.get(template)
        if gaps is None:
            self._gaps[template] = [1, line, 0.0, time or 0.0, 0.0, 0.0]
            return
        gap = line - gaps[1]
        longest = gaps[2] * _DECAY
        gaps[0] += 1
        gaps[1] = line
        gaps[2] = gap if gap > longest else longest
        if time is not None:
            gap = time - gaps[3]
            longest = gaps[4] * _DECAY
            gaps[3] = time
            gaps[4] = gap if gap > longest else longest
        gaps[5] = 0.0

    def silent(self, line: int, time: float | None) -> tuple[int, float, float] | None:
        """A template that has become silent at this line: its number, its lines' usual longest gap, and times that."""
        if line < self._next_look:
            return None
        earliest, found = math.inf, None
        for template, gaps in self._gaps.items():
            if gaps[0] < _LEAST_LINES or gaps[5]:
                continue
            due = gaps[1] + _TIMES * gaps[2] + 1
            if line < due:
                earliest = min(earliest, due)
            elif time is not None and time - gaps[3] <= _TIMES * gaps[4]:
                earliest = min(earliest, line + 1 + gaps[2])
            elif found is None:
                gaps[5] = 1.0
                found = template, gaps[2], (line - gaps[1]) / max(gaps[2], 1.0)
            else:
                earliest = line + 1
        self._next_look = min(earliest, line + 256)
        return found

    def forget(self, templates: "dict[int, Any]") -> None:
        """Keep only these templates."""
        self._gaps = {number: gaps for number, gaps in self._gaps.items() if number in templates}

    def state(self) -> dict[str, Any]:
        """JSON for [`load`]."""
        return {"gaps": [[number, *gaps] for number, gaps in self._gaps.items()], "next_look": self._next_look}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from [`state`]."""
        self._gaps = {number: gaps for number, *gaps in state["gaps"]}
        self._next_look = state["next_look"]
