"""Calls of tools in generated text, found piece by piece."""

import json
import re
import secrets
from collections.abc import Iterator
from typing import NamedTuple

from hf_recurrent.generation.constraints import CALL_BEGIN, CALL_END

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
_END = re.compile(r"\s*\}\s*" + re.escape(CALL_END))
_BEGINNING_OF_END = re.compile(r"[\s}]*(?:<[/a-z_]*)?$")
_LONGEST_HEAD = 400


class CallPart(NamedTuple):
    """A piece of a text."""

    text: str  # of the answer, or of the arguments of a call
    index: int | None = None  # number of the call; None for a piece of the answer
    id: str | None = None  # of a call that begins
    name: str | None = None  # of the tool of a call that begins


class CallSplitter:
    """Splits a text into free text and calls, `<tool_call>{"name": …, "arguments": …}</tool_call>`."""

    def __init__(self) -> None:
        self._left, self._arguments, self._state, self._index = "", "", self._text, -1

    def feed(self, text: str, is_last: bool) -> list[CallPart]:
        """The parts that are certain now."""
        self._left += text
        parts: list[CallPart] = []
        while True:
            before = self._state, self._left
            parts += (part for part in self._state(is_last) if part.text or part.id)
            if (self._state, self._left) == before or not self._left:
                return parts

    def _text(self, is_last: bool) -> Iterator[CallPart]:
        text, found, rest = self._left.partition(CALL_BEGIN)
        if found:
            self._left, self._state = rest, self._head
        else:
            held = 0 if is_last else _overlap(text, CALL_BEGIN)
            self._left = text[len(text) - held :]
            text = text[: len(text) - held]
        yield CallPart(text)

    def _head(self, is_last: bool) -> Iterator[CallPart]:
        found = _HEAD.match(self._left)
        if found:
            self._left, self._state, self._arguments = self._left[found.end() :], self._in_arguments, ""
            self._index += 1
            yield CallPart("", self._index, f"call_{secrets.token_hex(12)}", json.loads(found[1]))
        elif is_last or len(self._left) > _LONGEST_HEAD:  # no call
            text, self._left, self._state = CALL_BEGIN + self._left, "", self._text
            yield CallPart(text)

    def _in_arguments(self, is_last: bool) -> Iterator[CallPart]:
        if not self._arguments:
            self._left = self._left.lstrip()
        for found in _END.finditer(self._left):
            arguments = self._left[: found.start()]
            if _is_json(self._arguments + arguments):  # otherwise, it is within a string
                self._left, self._state = self._left[found.end() :], self._text
                yield CallPart(arguments, self._index)
                return
        end = len(self._left) if is_last else _BEGINNING_OF_END.search(self._left).start()
        new, self._left = self._left[:end], self._left[end:]
        self._arguments += new
        yield CallPart(new, self._index)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text that is a beginning of a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
