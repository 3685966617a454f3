"""Lines of a stream of bytes, in batches and in constant memory, whatever their length."""


class LineBatch:
    r"""Consecutive lines of one file.

    Attributes:
        contents: the lines without their line ends (`\n` or `\r\n`), cut to the limit of the splitter.
        number: of the first line in its file, from 1.
        offset: of the first line in its file, in bytes.
        lengths: bytes of each line in the file, with its line end; line k begins at `offset + sum(lengths[:k])`.
        cut: index of each line that was cut → its bytes, without the line end.
    """

    __slots__ = ("contents", "cut", "lengths", "number", "offset")

    def __init__(self, contents: list[bytes], number: int, offset: int, lengths: list[int], cut: dict[int, int]):
        self.contents, self.number, self.offset, self.lengths, self.cut = contents, number, offset, lengths, cut

    def __len__(self) -> int:
        return len(self.contents)


class LineSplitter:
    """Cuts chunks of bytes into lines, of which the first `max_bytes` are kept; further ones are only counted.

    Attributes:
        offset, number: of the first line in the file that was not taken yet.
    """

    def __init__(self, max_bytes: int, offset: int = 0, number: int = 1):
        self.offset, self.number = offset, number
        self._max_bytes = max_bytes
        # Complete lines, of which the first `_taken` were taken.
        self._contents: list[bytes] = []
        self._lengths: list[int] = []
        self._cut: dict[int, int] = {}
        self._taken = 0
        # The line whose end is not there yet. A byte more is kept, because it may belong to the line end.
        self._kept, self._length, self._ends_in_return = bytearray(), 0, False

    def feed(self, chunk: bytes) -> None:
        pieces = chunk.split(b"\n")
        rest = pieces.pop()
        if pieces:
            self._drop_taken()
            if self._length:
                self._hold(pieces.pop(0))
                self._end_line(1)
        if pieces:
            self._add(pieces, b"\r\n" in chunk)
        if rest:
            self._hold(rest)

    def finish(self) -> bool:
        """Complete the line whose end is not there; False if there is none."""
        if not self._length:
            return False
        self._drop_taken()
        self._end_line(0)
        return True

    def take(self, limit: int) -> LineBatch | None:
        """The next complete lines, at most `limit`; None if there are none."""
        begin, end = self._taken, min(self._taken + limit, len(self._contents))
        if begin >= end:
            return None
        cut = {index - begin: length for index, length in self._cut.items() if begin <= index < end}
        lengths = self._lengths[begin:end]
        batch = LineBatch(self._contents[begin:end], self.number, self.offset, lengths, cut)
        self.offset, self.number, self._taken = self.offset + sum(lengths), self.number + end - begin, end
        if end == len(self._contents):
            self._drop_taken()
        return batch

    def _drop_taken(self) -> None:
        if self._taken:
            del self._contents[: self._taken], self._lengths[: self._taken]
            self._cut = {index - self._taken: length for index, length in self._cut.items() if index >= self._taken}
            self._taken = 0

    def _add(self, lines: list[bytes], has_returns: bool) -> None:
        """Add whole lines without their `\n`; for usual lines, no Python code runs per line but the `+ 1`."""
        lengths = [length + 1 for length in map(len, lines)]
        if has_returns:
            lines = [line.removesuffix(b"\r") for line in lines]
        if max(lengths) > self._max_bytes:  # perhaps
            for index, line in enumerate(lines):
                if len(line) > self._max_bytes:
                    self._cut[len(self._contents) + index] = len(line)
                    lines[index] = line[: self._max_bytes]
        self._contents += lines
        self._lengths += lengths

    def _hold(self, piece: bytes) -> None:
        room = self._max_bytes + 1 - len(self._kept)
        if room > 0:
            self._kept += piece[:room]
        self._length += len(piece)
        if piece:
            self._ends_in_return = piece.endswith(b"\r")

    def _end_line(self, end_bytes: int) -> None:
        length = self._length - self._ends_in_return
        if length > self._max_bytes:
            self._cut[len(self._contents)] = length
        self._contents.append(bytes(self._kept[: min(length, self._max_bytes)]))
        self._lengths.append(self._length + end_bytes)
        self._kept, self._length, self._ends_in_return = bytearray(), 0, False
