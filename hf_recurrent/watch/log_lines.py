"""Lines of a stream of bytes, in constant memory whatever their length."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LogLine:
    """A line of a log.

    Args:
        number: of the line in its file, from 1.
        offset: of its first byte in the file.
        length: bytes, without the line end.
        content: its first bytes, up to the limit of the splitter.
    """

    number: int
    offset: int
    length: int
    content: bytes


class LineSplitter:
    """Cuts chunks of bytes into lines, of which the first `max_bytes` are kept; further ones are only counted.

    Attributes:
        offset, number: of the next line in its file.
    """

    def __init__(self, max_bytes: int, offset: int = 0, number: int = 1):
        self.offset, self.number = offset, number
        self._max_bytes = max_bytes
        self._chunk, self._begin = b"", 0
        self._kept, self._length = bytearray(), 0  # of the next line
        self._is_complete = False

    def feed(self, chunk: bytes) -> None:
        """Add the next chunk, after all lines of the last one were taken."""
        self._chunk, self._begin = chunk, 0

    def next_line(self) -> LogLine | None:
        """The next line; None if its end is not there yet."""
        if self._is_complete:
            return self._cut(0)
        found = self._chunk.find(b"\n", self._begin)
        end = len(self._chunk) if found < 0 else found
        room = self._max_bytes - len(self._kept)
        self._kept += self._chunk[self._begin : min(end, self._begin + room)]
        self._length += end - self._begin
        self._begin = end if found < 0 else end + 1
        return None if found < 0 else self._cut(1)

    def finish(self) -> bool:
        """Complete a line without a line end, after all others were taken; False if there is none."""
        self._is_complete = self._length > 0
        return self._is_complete

    def _cut(self, end_bytes: int) -> LogLine:
        line = LogLine(self.number, self.offset, self._length, bytes(self._kept))
        self.offset, self.number = self.offset + self._length + end_bytes, self.number + 1
        self._kept, self._length, self._is_complete = bytearray(), 0, False
        return line
