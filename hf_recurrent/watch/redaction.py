"""Secrets in log lines, which are replaced before anything reads them."""

import re
from collections.abc import Sequence

REPLACEMENT = b"<redacted>"
_NAMES = (
    rb"pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|auth|authorization|cookie"
    rb"|session[_-]?id|signature"
)
_IGNORING_CASE = re.compile(rb"(?i)(?<=\bbearer )[\w.~+/=-]+|(?<=\bbasic )[\w+/=-]{8,}")
_PATTERNS = (
    rb"eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]+)?",  # a JSON web token
    rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    rb"\b(?:gh[pousr]|hf|sk|xox[abp])[_-][A-Za-z0-9_-]{16,}\b",
    rb"[\w.+-]+@[\w-]+\.[\w.-]+\w",
    rb"(?<=://)[^/@\s:]+:[^/@\s]+(?=@)",
    rb"\b(?:\d[ -]?){13,16}\b(?![\d.:])",  # a payment card
)
_VALUE = re.compile(rb"(?i)(\b[\w.-]*(?:" + _NAMES + rb")[\w.-]*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;&}\]\"']+)")


class Redactor:
    """Replaces secrets by `<redacted>`: values of names such as `password` and `token`, keys of known forms, mail
    addresses, passwords in URLs and card numbers, and matches of further regular expressions.
    """

    def __init__(self, patterns: Sequence[str] = ()):
        try:
            for pattern in patterns:
                re.compile(pattern.encode())
        except re.error as error:
            raise ValueError(f"`--redact_pattern` is {pattern!r}, not a regular expression: {error}.") from error
        self._pattern = re.compile(b"|".join(b"(?:" + p + b")" for p in (*_PATTERNS, *map(str.encode, patterns))))

    def redact(self, line: bytes) -> bytes:
        line = self._pattern.sub(REPLACEMENT, _IGNORING_CASE.sub(REPLACEMENT, line))
        return _VALUE.sub(rb"\1" + REPLACEMENT, line)
