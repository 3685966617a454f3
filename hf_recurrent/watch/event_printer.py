"""Events as text: in color on a terminal, with the rare value marked; one line each elsewhere."""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import IO

from hf_recurrent.watch.events import Event

_BOLD_RED, _DIM, _PLAIN = "\033[1;31m", "\033[2m", "\033[0m"
# Everything that could move the cursor or hide text.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_LEAST_WIDTH = 40


class EventPrinter:
    """Prints events, with the name of the log if several are read.

    The color is `always`, `never`, or `auto`: it follows the terminal and the variable `NO_COLOR`.
    """

    def __init__(self, color: str, has_names: bool, file: IO[str] | None = None):
        self._file = file or sys.stdout
        self._is_terminal = self._file.isatty()
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self._has_color = color == "always" or (color == "auto" and self._is_terminal and not plain)
        self._has_names = has_names

    def show(self, log: str, event: Event, *, explains: bool = False) -> None:
        """Print an event with its line, cut to a terminal's width; `explains` adds the nearest line before it."""
        head = f"{os.path.basename(log)}:" if self._has_names else "line "
        head += f"{event.first_line:,}: {printable(event.summary.encode(), [])[0]} [{event.id}]"
        text, marks = printable(event.text, [] if event.span is None else [event.span])
        if self._is_terminal:
            width = max(shutil.get_terminal_size().columns, _LEAST_WIDTH) - 3
            text, marks = cut(text, marks, width)
        if self._is_terminal or self._has_color:
            lines = [self._colored(head, _DIM), f"  {self._highlighted(text, marks)}"]
            if marks and not self._has_color:
                lines.append("  " + underline(marks))
        else:
            lines = [f"{head}: {text}"]
        if explains and event.nearest is not None:
            lines.append(f"  before: {printable(event.nearest, [])[0]}")
        print("\n".join(lines), file=self._file, flush=True)

    def show_ended(self, log: str, event: Event) -> None:
        """Print that an event of several lines has ended."""
        head = f"{os.path.basename(log)}:" if self._has_names else "lines "
        head += f"{event.first_line:,} to {event.last_line:,}: {event.count:,} lines in all [{event.id}]"
        print(self._colored(head, _DIM), file=self._file, flush=True)

    def _colored(self, text: str, color: str) -> str:
        return f"{color}{text}{_PLAIN}" if self._has_color else text

    def _highlighted(self, text: str, marks: Sequence[tuple[int, int]]) -> str:
        if not self._has_color:
            return text
        result, end = "", 0
        for begin, stop in marks:
            result += text[end:begin] + self._colored(text[begin:stop], _BOLD_RED)
            end = stop
        return result + text[end:]


def printable(content: bytes, marks: Sequence[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """A line as text that does nothing to a terminal, and the marked bytes as ranges of characters."""
    marked = bytearray(len(content))
    for begin, stop in marks:
        marked[begin:stop] = b"\1" * (stop - begin)
    text, ranges, byte = "", [], 0
    for char in content.decode("utf-8", "surrogateescape"):
        shown = _UNPRINTABLE.sub(_escape, char)
        size = len(char.encode("utf-8", "surrogateescape"))
        if any(marked[byte : byte + size]):
            if ranges and ranges[-1][1] == len(text):
                ranges[-1] = (ranges[-1][0], len(text) + len(shown))
            else:
                ranges.append((len(text), len(text) + len(shown)))
        text, byte = text + shown, byte + size
    return text, ranges


def _escape(match: re.Match[str]) -> str:
    """A tab as a space; a byte that is not UTF-8 as one; anything else by its code."""
    code = ord(match.group())
    if code == ord("\t"):
        return " "
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def cut(text: str, marks: Sequence[tuple[int, int]], width: int) -> tuple[str, list[tuple[int, int]]]:
    """At most `width` characters of a line, the first mark among them."""
    if len(text) <= width:
        return text, list(marks)
    first = marks[0][0] if marks else 0
    begin = 0 if first < width * 2 // 3 else min(first - width // 3, len(text) - width)
    shown = text[begin : begin + width]
    if begin:
        shown = "…" + shown[1:]
    if begin + width < len(text):
        shown = shown[:-1] + "…"
    inside = [(max(a - begin, 0), min(b - begin, width)) for a, b in marks]
    return shown, [(a, b) for a, b in inside if a < b]


def underline(marks: Sequence[tuple[int, int]]) -> str:
    """A line with a caret under each marked character."""
    line = ""
    for begin, stop in marks:
        line += " " * (begin - len(line)) + "^" * (stop - begin)
    return line
