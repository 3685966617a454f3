"""Running an action in a forked child, where it may crash, hang or fill the memory without harm to the program.

Importing torch takes seconds and forking milliseconds, so that hundreds of cases are cheap. torch must have one thread
when the first child is forked: the threads of its pool do not exist in children.
"""

import faulthandler
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

TRACEBACK_STATUS = 99
_MOST_MEMORY = 16 << 30  # bytes of address space, of which torch reserves some


@dataclass
class Outcome:
    """The end of a child: its exit status, negative for a signal, and its output. `timed_out` if it was killed."""

    status: int
    out: str
    err: str
    timed_out: bool = False

    @property
    def crashed(self) -> bool:
        return self.status < 0

    @property
    def has_traceback(self) -> bool:
        return self.status == TRACEBACK_STATUS or "Traceback (most recent call last)" in self.err


def run_forked(
    action: Callable[[], object],
    seconds: float = 60.0,
    most_memory: int = _MOST_MEMORY,
    interruption: tuple[int, float] | None = None,
) -> Outcome:
    """Call `action` in a child.

    Its status is 0, the code of a SystemExit, or 99 after another exception, whose traceback is in `err`.

    Args:
        action: takes no arguments; its result is ignored.
        seconds: the child is killed after this time; shortly before, the stacks of its threads are written to `err`.
        most_memory: bytes of address space that the child may have.
        interruption: a signal, and the seconds after which the child gets it.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            status = TRACEBACK_STATUS
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                resource.setrlimit(resource.RLIMIT_AS, (most_memory, most_memory))
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                faulthandler.dump_traceback_later(0.9 * seconds, file=err)
                status = _status_of(action)
            finally:  # even if printing fails: the child must not go on as a second parent
                os._exit(status)
        status, timed_out = _wait(child, seconds, interruption)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return Outcome(os.waitstatus_to_exitcode(status), *texts, timed_out)


def _status_of(action: Callable[[], object]) -> int:
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    try:
        action()
        status = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
        status = TRACEBACK_STATUS
    sys.stdout.flush()
    sys.stderr.flush()
    return status & 0xFF


def _wait(child: int, seconds: float, interruption: tuple[int, float] | None) -> tuple[int, bool]:
    begin = time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status, False
        passed = time.monotonic() - begin
        if interruption is not None and passed > interruption[1]:
            os.kill(child, interruption[0])
            interruption = None
        if passed > seconds:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1], True
        time.sleep(0.002)
