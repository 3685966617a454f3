"""Parts that users register under a name of their choice: tasks, and sources of documents."""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any


class OwnParts:
    """The registered parts of a kind such as "task", apart from the package's own, named `built_in`.

    `check` raises a ValueError for a part of another kind.
    """

    def __init__(self, kind: str, built_in: Collection[str], check: Callable[[str, Any], None]) -> None:
        self._kind, self._built_in, self._check = kind, built_in, check
        self._parts: dict[str, Any] = {}
        self._code: dict[str, str | None] = {}

    def add(self, name: str, part: Any) -> None:
        """Register a part; the same code may be registered again."""
        self._check(name, part)
        if not isinstance(name, str) or not name.isidentifier() or len(name) < 2:  # C: is a drive
            raise ValueError(f"A {self._kind} is named {name!r}; it must be an identifier of at least two characters.")
        if name in self._built_in:
            raise ValueError(f"{name!r} is a {self._kind} of this package; choose another name.")
        code = _code_of(part)
        if name in self._parts and (code is None or code != self._code[name]):
            raise ValueError(
                f"The {self._kind} {name!r} is registered already, with other code; choose another name, or restart "
                "Python after a change."
            )
        self._parts[name], self._code[name] = part, code

    def get(self, name: str) -> Any:
        return self._parts.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)


def hint_for_unknown(name: str, known: Collection[str], how: str) -> str:
    """The sentences after an unknown name: the nearest known one, and how to register another."""
    nearest = difflib.get_close_matches(name, list(known), 1)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"{hint}Import the file that registers {how} first (`--import FILE` on the command line)."


def _code_of(part: Any) -> str | None:
    """The text of the file that defines a part; of `__main__` and notebooks, the source of the part alone."""
    try:
        if part.__module__ not in ("__main__", "__mp_main__"):
            return Path(inspect.getsourcefile(part) or "").read_text(encoding="utf-8")
        return inspect.getsource(part)
    except (AttributeError, OSError, TypeError, ValueError):
        return None
