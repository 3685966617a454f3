"""Ctrl-C and SIGTERM as requests to stop between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest(threading.Event):
    """Set by a signal; `number` is the number of the first one, or None."""

    number: signal.Signals | None = None


@contextmanager
def stop_on_signals(repeatable: bool = False) -> Iterator[StopRequest]:
    """Inside the block, Ctrl-C and SIGTERM only set the event, and only in the main thread.

    Args:
        repeatable: the same for all further signals; otherwise the second one acts as usual. A launcher of several
            processes sends each signal again.
    """
    stop, before = StopRequest(), {}

    def request(number: int, frame: object) -> None:
        stop.number = stop.number or signal.Signals(number)
        stop.set()
        if not repeatable:
            restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, request)
    except ValueError:  # only the main thread receives signals
        pass
    try:
        yield stop
    finally:
        restore()
