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
        end: offset after the line and its line end.
    """

    number: int
    offset: int
    length: int
    content: bytes
    end: int


class LineSplitter:
    """Cuts chunks of bytes into lines.

    Args:
        max_bytes: bytes of a line that are kept; further ones are only counted.
        offset: of the first chunk in its file.
        number: of the first line.
    """

    def __init__(self, max_bytes: int, offset: int = 0, number: int = 1):
        self._max_bytes, self._offset, self._number = max_bytes, offset, number
        self._kept, self._length = bytearray(), 0

    def feed(self, chunk: bytes) -> list[LogLine]:
        """The lines that end in the next chunk."""
        lines, begin = [], 0
        while (end := chunk.find(b"\n", begin)) >= 0:
            self._extend(chunk, begin, end)
            lines.append(self._cut(1))
            begin = end + 1
        self._extend(chunk, begin, len(chunk))
        return lines

    def finish(self) -> list[LogLine]:
        """The last line, if it has no line end; the next byte begins a new line."""
        return [self._cut(0)] if self._length else []

    def _extend(self, chunk: bytes, begin: int, end: int) -> None:
        room = self._max_bytes - len(self._kept)
        self._kept += chunk[begin : min(end, begin + room)]
        self._length += end - begin

    def _cut(self, end_bytes: int) -> LogLine:
        end = self._offset + self._length + end_bytes
        line = LogLine(self._number, self._offset, self._length, bytes(self._kept), end)
        self._kept, self._length, self._offset, self._number = bytearray(), 0, end, self._number + 1
        return line
