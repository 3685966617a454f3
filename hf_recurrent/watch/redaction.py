"""Secrets in log lines, which are replaced before anything reads them."""

import re
from collections.abc import Sequence

REPLACEMENT = b"<redacted>"
_NAMES = (
    rb"pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|auth|authorization|cookie"
    rb"|session[_-]?id|signature"
)
_PATTERNS = (
    rb"(?i)(?<=\bbearer )[\w.~+/=-]+",
    rb"(?i)(?<=\bbasic )[\w+/=-]{8,}",
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
    addresses, passwords in URLs and card numbers.

    Args:
        patterns: further regular expressions, of which each whole match is a secret.

    Raises:
        ValueError: a pattern is not a regular expression.
    """

    def __init__(self, patterns: Sequence[str] = ()):
        try:
            for pattern in patterns:
                re.compile(pattern.encode())
        except re.error as error:
            raise ValueError(f"`--redact_pattern` is {pattern!r}, not a regular expression: {error}.") from error
        self._pattern = re.compile(b"|".join(b"(?:" + p + b")" for p in _without_flags(patterns)))
        self._ignoring_case = re.compile(b"|".join(p[4:] for p in _PATTERNS if p.startswith(b"(?i)")), re.IGNORECASE)

    def redact(self, line: bytes) -> bytes:
        """The line without secrets."""
        line = self._pattern.sub(REPLACEMENT, self._ignoring_case.sub(REPLACEMENT, line))
        return _VALUE.sub(rb"\1" + REPLACEMENT, line)


def _without_flags(patterns: Sequence[str]) -> list[bytes]:
    return [p for p in _PATTERNS if not p.startswith(b"(?i)")] + [pattern.encode() for pattern in patterns]
