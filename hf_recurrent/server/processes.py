"""Several processes that serve one port: they accept from the same socket, and one that dies is started again."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM)
_SHORTEST_LIFE = 1.0  # seconds; a process that lived shorter is restarted after this delay


class Processes:
    """The parent of processes.

    `run` serves until SIGTERM; it is called in each process, with a function to call once it accepts requests.
    """

    def __init__(self, count: int, run: Callable[[Callable[[], None]], None]):
        self._count, self._run, self._is_stopping = count, run, False
        self._parent, self._own = os.pipe()  # closed when the parent ends, however that happens
        self._began: dict[int, float] = {}  # process → when it was started

    def serve(self, report: Callable[[], None]) -> None:
        """Run all until SIGINT or SIGTERM; `report` is called once all accept requests.

        Raises a RuntimeError if a process has ended before that; its error is on standard error.
        """
        for name in _STOPS:
            signal.signal(name, self._stop)
        ready = [self._start() for _ in range(self._count)]
        has_failed = not all(_is_written(pipe) for pipe in ready) and not self._is_stopping
        if has_failed:
            self._stop()
        elif not self._is_stopping:
            report()
        while self._began:
            pid, _ = os.wait()
            began = self._began.pop(pid, None)
            if self._is_stopping or began is None:
                continue
            if time.monotonic() - began < _SHORTEST_LIFE:
                time.sleep(_SHORTEST_LIFE)
            if not self._is_stopping:
                os.close(self._start())
        if has_failed:
            raise RuntimeError("A process of the server has ended before it could serve.")

    def _start(self) -> int:
        """Start a process; returns the end of a pipe that it writes to."""
        ready, written = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # a signal in between would be the parent's in the child
        pid = os.fork()
        if pid:
            os.close(written)
            self._began[pid] = time.monotonic()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            return ready
        status = 1
        try:
            os.close(ready)
            os.close(self._own)
            os.setpgid(0, 0)  # Ctrl-C reaches the parent only, which passes it on
            threading.Thread(target=_end_with, args=(self._parent,), daemon=True).start()
            for name in _STOPS:
                signal.signal(name, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            self._run(lambda: _write(written))
            status = 0
        except (OSError, ValueError, ImportError) as error:
            print(f"hf-recurrent serve: error: {error}", file=sys.stderr, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _stop(self, number: int | None = None, frame: FrameType | None = None) -> None:
        self._is_stopping = True
        for pid in self._began:
            os.kill(pid, signal.SIGTERM)


def _end_with(parent: int) -> None:
    """Stop this process when its parent has ended."""
    os.read(parent, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _write(pipe: int) -> None:
    with suppress(BrokenPipeError):  # a restarted process has no waiting parent
        os.write(pipe, b"1")
    os.close(pipe)


def _is_written(pipe: int) -> bool:
    """Wait until a process has written to its pipe; False if it has ended before."""
    data = os.read(pipe, 1)
    os.close(pipe)
    return bool(data)
