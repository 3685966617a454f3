"""Variable parts of log lines: times, addresses, numbers and identifiers, and how a line looks without them."""

import re
from itertools import islice
from operator import itemgetter

_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_DAY = rb"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_CLOCK = rb"\d{1,2}:\d\d:\d\d(?:[.,]\d{1,9})?"
_ZONE = rb"(?:Z|\ ?[+-]\d\d:?\d\d)?"
_TIMES = (
    rb"\d{4}[-/.]\d\d[-/.]\d\d[T\ _-]\d\d[:.]\d\d[:.]\d\d(?:[.,]\d{1,9})?" + _ZONE,
    rb"(?:" + _DAY + rb",?\ +)?" + _MONTH + rb"\ {1,2}\d{1,2},?\ +(?:\d{4}\ )?" + _CLOCK + rb"(?:\ \d{4})?",
    rb"(?:" + _DAY + rb",?\ +)?\d{1,2}[-/\ ]" + _MONTH + rb"[-/\ ]\d{4}[:\ ]" + _CLOCK + _ZONE,
    rb"\d\d/\d\d/(?:\d\d){1,2}[\ -]" + _CLOCK,
    rb"\d{4}[-/.]\d\d[-/.]\d\d",
    _CLOCK,
    rb"(?<=^)\d{6}\ \d{6}(?=\ )",  # yymmdd hhmmss at the beginning
    rb"(?<!\S)1\d{9}(?:\.\d+|\d{3})?(?!\S)",  # seconds or milliseconds since 1970
)
# The kinds, each with the byte that stands for its bytes in `Masked.filled`.
TIME, UUID, HEX, ADDRESS, NUMBER = b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"
_FILLS = {"time": TIME, "uuid": UUID, "hex": HEX, "address": ADDRESS, "number": NUMBER}
_VARIABLE = re.compile(
    rb"(?=[-0-9a-fA-FJMNOSTW])(?:"  # fails fast at other bytes
    rb"(?<![\w.])(?P<time>" + rb"|".join(_TIMES) + rb")(?![\w])"
    rb"|(?P<uuid>[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12})"
    rb"|(?P<hex>0[xX][0-9a-fA-F]+|(?<![0-9A-Za-z])(?=[a-fA-F]*\d)(?=\d*[a-fA-F])[0-9a-fA-F]{6,}(?![0-9A-Za-z]))"
    rb"|(?P<address>(?<![\d.])\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\d.])(?::\d+)?)"
    rb"|(?P<number>(?<![0-9A-Za-z])-?\d+(?:\.\d+)?|\d+))"
)
RUN = re.compile(rb"([\x01-\x05])\1*")
FIRST = itemgetter(1)  # of a match; a template such as \1 is expanded in Python
_TOKEN = re.compile(rb"\S+")
# Words of a line that are compared. Each has counts of its own, and a line of 300 kB has tens of thousands.
MOST_LINE_WORDS = 1024
# Every digit becomes 0: lines that are equal then have all their variables at equal offsets, but for hexadecimal ones.
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
# Bytes that stand for variables do not come from the line itself.
_CONTROLS = bytes.maketrans(b"\x01\x02\x03\x04\x05", b"?????")


def digits_masked(line: bytes) -> bytes:
    """The line with every digit replaced by 0."""
    return line.translate(_DIGITS)


class Masked:
    """A line without its variables.

    Attributes:
        filled: the line, with each byte of a variable replaced by the byte of its kind; all offsets are the line's.
        tokens: words between white space, the first 1,024; a variable is one byte of its kind.
        spans: begin and end of each token in the line.
        time: begin and end of the first time, or None.
    """

    __slots__ = ("filled", "spans", "time", "tokens")

    def __init__(self, line: bytes):
        self.time: tuple[int, int] | None = None
        self.filled = _VARIABLE.sub(self._fill, line.translate(_CONTROLS))
        self.tokens: list[bytes] = RUN.sub(FIRST, self.filled).split()[:MOST_LINE_WORDS]
        self.spans = [match.span() for match in islice(_TOKEN.finditer(self.filled), MOST_LINE_WORDS)]

    def _fill(self, match: re.Match[bytes]) -> bytes:
        begin, end = match.span()
        kind = match.lastgroup or "number"
        if kind == "time" and self.time is None:
            self.time = (begin, end)
        return _FILLS[kind] * (end - begin)
