"""Templates that come regularly, and silence where one should have come."""

import math
from collections.abc import Container
from typing import Any

# Lines of a template before it counts as regular, and how many times its longest gap is silence.
_LEAST_LINES, _TIMES = 12, 3.0
# Each line shortens the longest gap by this factor, so that a single long gap is forgotten at last.
_DECAY = 0.9995
# Lines between two looks, at most.
_BETWEEN_LOOKS = 256


class Regularity:
    """Gaps between the lines of each template, in lines: in a quiet night, no template is silent."""

    __slots__ = ("_gaps", "_next_look")

    def __init__(self) -> None:
        # Template → [lines, last line, longest gap, is silent].
        self._gaps: dict[int, list[float]] = {}
        self._next_look = 0.0

    def add(self, template: int, line: int) -> None:
        """Note a line of a template."""
        gaps = self._gaps.get(template)
        if gaps is None:
            self._gaps[template] = [1, line, 0.0, 0.0]
            return
        gap, longest = line - gaps[1], gaps[2] * _DECAY
        gaps[0] += 1
        gaps[1] = line
        gaps[2] = gap if gap > longest else longest
        gaps[3] = 0.0

    def silent(self, line: int) -> tuple[int, float, float] | None:
        """A template that becomes silent at this line: its number, its longest gap, and how many times that it is."""
        if line < self._next_look:
            return None
        earliest, found = math.inf, None
        for template, gaps in self._gaps.items():
            if gaps[0] < _LEAST_LINES or gaps[3]:
                continue
            due = gaps[1] + _TIMES * gaps[2] + 1
            if line < due:
                earliest = min(earliest, due)
            elif found is None:
                gaps[3] = 1.0
                found = template, gaps[2], (line - gaps[1]) / max(gaps[2], 1.0)
            else:
                earliest = line + 1
        self._next_look = min(earliest, line + _BETWEEN_LOOKS)
        return found

    def keep(self, templates: Container[int]) -> None:
        """Forget all other templates."""
        self._gaps = {number: gaps for number, gaps in self._gaps.items() if number in templates}

    def state(self) -> dict[str, Any]:
        """JSON for [`load`]."""
        return {"gaps": [[number, *gaps] for number, gaps in self._gaps.items()], "next_look": self._next_look}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from [`state`]."""
        self._gaps = {number: gaps for number, *gaps in state["gaps"]}
        self._next_look = state["next_look"]
