"""A process in a pseudo-terminal, for tests of what a user sees and types."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
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
        columns: width of the terminal.
        environment: further variables.
        program: in place of hf-recurrent.
        server: starts hf-recurrent, whose imports it has made.
    """

    def __init__(
        self,
        words: Sequence[str],
        columns: int = 80,
        environment: dict[str, str] | None = None,
        program: Sequence[str] = (sys.executable, "-m", "hf_recurrent.cli.main"),
        cwd: str | os.PathLike | None = None,
        server: CommandServer | None = None,
    ) -> None:
        self._master, slave = pty.openpty()
        self._slave: int | None = slave
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        variables = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        variables |= {"TERM": "xterm"} | (environment or {})
        if server:
            streams = [os.ttyname(slave)] * 3
            self.process = server.start(_in_terminal, os.fspath(cwd or "."), streams, variables, list(words))
        else:
            self.process = subprocess.Popen(
                [*program, *words], stdin=slave, stdout=slave, stderr=slave, cwd=cwd, start_new_session=True,
                env=variables, preexec_fn=_own_terminal,
            )  # fmt: skip
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


def _own_terminal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # processes in the background of a shell ignore it
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the process


def _in_terminal(folder: str, streams: list[str], environment: dict[str, str], words: list[str]) -> None:
    os.setsid()
    redirected(folder, streams, environment, _run_in_own_terminal, (words,))


def _run_in_own_terminal(words: list[str]) -> None:
    _own_terminal()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_command(words)


def shown_lines(output: str) -> list[str]:
    """The lines that a terminal shows at some time: what follows a carriage return is a new state of its line."""
    without_colours = re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])", "", output)
    return re.split(r"[\r\n]+", without_colours)
