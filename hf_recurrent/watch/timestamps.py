"""Times of log lines, in the usual formats."""

import re
from datetime import UTC, datetime, timedelta, timezone
from functools import lru_cache

from hf_recurrent.watch.saved_state import Saved

_MONTHS = {name: number for number, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}
_CLOCK = rb"(?P<hour>\d{1,2})[:.](?P<minute>\d\d)[:.](?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?"
_ZONE = rb"\ ?(?P<zone>Z|[+-]\d\d:?\d\d)?"
_NAME = rb"(?P<name>[A-Z][a-z]{2})"
_FORMATS = tuple(
    re.compile(pattern)
    for pattern in (
        rb"(?P<year>\d{4})[-/.](?P<month>\d\d)[-/.](?P<day>\d\d)(?:[T\ _-]" + _CLOCK + _ZONE + rb")?",
        rb"(?:[A-Z][a-z]{2},?\ +)?"
        + _NAME
        + rb"\ +(?P<day>\d{1,2}),?\ +(?:(?P<year>\d{4})\ )?"
        + _CLOCK
        + rb"(?:\ (?P<late_year>\d{4}))?",
        rb"(?:[A-Z][a-z]{2},?\ +)?(?P<day>\d{1,2})[-/\ ]" + _NAME + rb"[-/\ ](?P<year>\d{4})[:\ ]" + _CLOCK + _ZONE,
        rb"(?P<short_year>\d\d)/(?P<month>\d\d)/(?P<day>\d\d)[\ -]" + _CLOCK,
        rb"(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>\d{4})[\ -]" + _CLOCK,
        rb"(?P<short_year>\d\d)(?P<month>\d\d)(?P<day>\d\d)\ (?P<hour>\d\d)(?P<minute>\d\d)(?P<second>\d\d)",
        _CLOCK,
    )
)
_EPOCH = re.compile(rb"(?P<seconds>\d{10})(?:\.(?P<fraction>\d{1,9})|(?P<millis>\d{3}))?")
_DAY, _YEAR = 86_400.0, 31_536_000.0
_MOST_KEPT = 4096


def parse_time(text: bytes) -> float | None:
    """Seconds since 1970 of a time; None if it is in no known format.

    Args:
        text: such as `2015-07-29 17:41:44,747`, `Jun 14 15:16:01`, `17/06/09 20:10:40` or `1117838570`. Without a
            zone it is taken as UTC; without a year it is in 1970, and without a date on its first day.
    """
    epoch = _EPOCH.fullmatch(text)
    if epoch is not None:
        fraction = epoch["fraction"] or epoch["millis"]
        return int(epoch["seconds"]) + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)
    for pattern in _FORMATS:
        match = pattern.fullmatch(text)
        if match is not None:
            return _seconds(match.groupdict())
    return None


def _seconds(found: dict[str, bytes | None]) -> float | None:
    def number(name: str, default: int = 0) -> int:
        text = found.get(name)
        return default if text is None else int(text)

    name = found.get("name")
    month = number("month", 1) if name is None else _MONTHS.get(name, 0)
    short = number("short_year", 70)
    year = number("late_year") or number("year", short + (2000 if short < 70 else 1900))
    time = number("hour"), number("minute"), min(number("second"), 59)
    try:
        clock = datetime(year, month, number("day", 1), *time, tzinfo=UTC)
    except ValueError:
        return None
    zone = found.get("zone")
    if zone is not None and zone != b"Z":
        sign, digits = (-1 if zone[:1] == b"-" else 1), zone[1:].replace(b":", b"")
        offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
        try:
            clock = clock.replace(tzinfo=timezone(sign * offset))
        except ValueError:  # more than a day
            return None
    fraction = found.get("fraction")
    return clock.timestamp() + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)


@lru_cache(_MOST_KEPT)
def _recent_time(text: bytes) -> float | None:
    """`parse_time`; of the times in a minute, one is parsed."""
    if text.endswith(b"00") or not (text[-6:-5] == text[-3:-2] == b":"):
        return parse_time(text)
    minute = _recent_time(text[:-2] + b"00")
    return None if minute is None else minute + min(int(text[-2:]), 59)


class LogClock(Saved):
    """Reads the times of one log, which go forwards: times without a year or a date pass into the next one."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._added = 0.0

    def time(self, text: bytes) -> float | None:
        """Seconds since 1970, or since the first year or day of the log; None for an unknown format."""
        found = _recent_time(text)
        if found is None or found >= _YEAR:
            return found
        period = _YEAR if text[:1].isalpha() else _DAY
        time = found + self._added
        if time < self._last - period / 2:
            self._added += period
            time += period
        elif time > self._last + period / 2 and self._added:  # a late line of the year or day before
            return time - period
        self._last = time
        return time
