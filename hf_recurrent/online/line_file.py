"""`LineFile`: a file that whole lines are appended to, also on a full disk."""

import os
import stat


class LineFile:
    """A file opened for appending lines, with further flags of `os.open`; created if it does not exist."""

    def __init__(self, path: str | os.PathLike, flags: int = 0):
        flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o666)
        self.is_regular = stat.S_ISREG(self.status().st_mode)

    def status(self) -> os.stat_result:
        """Identity and size."""
        return os.fstat(self._descriptor)

    def append(self, line: bytes) -> None:
        """Write a line, or raise an OSError and leave the file as it was (a pipe may have a part of the line)."""
        rest, size = memoryview(line), self.status().st_size
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if self.is_regular:
                self.truncate(size)
            raise

    def truncate(self, size: int) -> None:
        """Remove the bytes after the first `size`."""
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
