"""A process in a pseudo-terminal, for tests of what a user sees and types."""

import contextlib
import os
import re
import select
import signal
import time
from collections.abc import Sequence

from command_server import CommandServer, redirected, run_command

try:
    import fcntl
    import pty
    import struct
    import termios
except ImportError:  # Windows
    pty = None


class Terminal:
    """A command of hf-recurrent whose three standard streams are one terminal.

    Args:
        words: of the command line.
        server: starts the command.
        columns: width of the terminal.
        environment: further variables.
        cwd: the working directory.
    """

    def __init__(
        self,
        words: Sequence[str],
        server: CommandServer,
        columns: int = 80,
        environment: dict[str, str] | None = None,
        cwd: str | os.PathLike = ".",
    ) -> None:
        self._master, slave = pty.openpty()
        self._slave: int | None = slave
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        variables = {"TERM": "xterm"} | (environment or {})
        streams = [os.ttyname(slave)] * 3
        self.process = server.start(_in_terminal, os.path.abspath(cwd), streams, variables, list(words))
        self.output = ""
        self._seen = 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()
        self._leave_to_process()
        os.close(self._master)

    def send(self, text: str) -> None:
        """Type text; a line ends with "\\n", Ctrl-C is "\\x03", Ctrl-D is "\\x04"."""
        os.write(self._master, text.encode())

    def expect(self, pattern: str, seconds: float = 60.0) -> str:
        """Wait until a pattern appears in the output after the last call's; return the output up to its end."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.output[self._seen :])):
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"{pattern!r} did not appear after:\n{self.output[self._seen :]}")
        begin, self._seen = self._seen, self._seen + found.end()
        return self.output[begin : self._seen]

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the end of the process; return its exit status."""
        end = time.monotonic() + seconds
        while self._read(end - time.monotonic()):
            pass
        return self.process.wait(max(end - time.monotonic(), 1))

    def _read(self, seconds: float) -> bool:
        """Read what has been printed; False at the end of the output or of the time."""
        if seconds <= 0 or not select.select([self._master], [], [], seconds)[0]:
            return False
        data = b""
        with contextlib.suppress(OSError):  # Linux reports the end of a terminal's output as an error
            data = os.read(self._master, 65536)
        self._leave_to_process()
        self.output += data.decode("utf-8", "replace")
        return bool(data)

    def _leave_to_process(self) -> None:
        """Close this side of the terminal, which the process has opened: so its end is the end of the output."""
        if self._slave is not None:
            os.close(self._slave)
            self._slave = None


def _in_terminal(folder: str, streams: list[str], environment: dict[str, str], words: list[str]) -> None:
    os.setsid()
    redirected(folder, streams, environment, _run_in_own_terminal, (words,))


def _run_in_own_terminal(words: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background of a shell ignore it
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the process
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    run_command(words)


def shown_lines(output: str) -> list[str]:
    """The lines that a terminal shows at some time: what follows a carriage return is a new state of its line."""
    without_colours = re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])", "", output)
    return re.split(r"[\r\n]+", without_colours)
