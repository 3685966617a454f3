"""How severe a line says that it is: its level, or words of failure."""

import re

# Levels as most programs write them: in capitals, or in brackets or after `level=`.
_LEVELS = (
    (5, rb"FATAL|CRITICAL|CRIT|EMERG|EMERGENCY|PANIC|SEVERE", rb"fatal|critical|crit|emerg|panic|alert"),
    (4, rb"ERROR|ERR|FAILURE", rb"error|err"),
    (1, rb"WARNING|WARN", rb"warning|warn"),
    (0, rb"INFO|NOTICE|DEBUG|TRACE", rb"info|notice|debug|trace"),
)
_LEVEL_PATTERNS = tuple(
    (rank, re.compile(rb"(?<![\w.])(?:" + upper + rb")(?![\w.])|(?:\[|level=\"?|\"level\": ?\")(?:" + lower + rb")\b"))
    for rank, upper, lower in _LEVELS
)
_FAILURES = re.compile(
    rb"(?i)\b(?:\w*error\w*|\w*fail\w*|\w*exception|abort\w*|denied|refused|corrupt\w*"
    rb"|crash\w*|killed|unable|cannot|can't|could not|invalid|illegal|unexpected\w*|timed out|timeout|lost|broken"
    rb"|severed|terminated|dead\w*)\b"
)
_FATAL = re.compile(rb"(?i)\b(?:fatal|panic|critical|alert|severe)\b")
_WARNINGS = re.compile(rb"(?i)\b(?:warn\w*|retry\w*|unknown|not found|missing|bad)\b")

LEVELS = ("usual", "a warning", "a failure", "a failure", "an error", "fatal", "fatal")


def severity_of(line: bytes) -> int:
    """Rank of a line: 0 none or a usual level, 1 warning, 2 words of failure, 4 error, 5 fatal, 6 fatal with failure.

    Words of failure in a line of a usual level or a warning count as 2.
    """
    level = next((rank for rank, pattern in _LEVEL_PATTERNS if pattern.search(line)), None)
    has_failure = _FAILURES.search(line) is not None
    if level == 5:
        return 6 if has_failure else 5
    if level == 4:
        return 4
    if has_failure or _FATAL.search(line):
        return 2
    return 1 if level == 1 or _WARNINGS.search(line) else 0
