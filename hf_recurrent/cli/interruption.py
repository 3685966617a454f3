"""Ctrl-C and SIGTERM as requests to stop between two steps."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Event

# Bytes between two checks for a request.
_PIECE = 64


@contextmanager
def stop_on_signals() -> Iterator[Event]:
    """Inside the block, the first Ctrl-C or SIGTERM only sets the event; the second one acts as usual."""
    stop, before = Event(), {}

    def request(number, frame):
        stop.set()
        restore()

    def restore():
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


def read_until(stop: Event, source: Iterable[bytes]) -> Iterator[bytes]:
    """The source in small pieces, so that Ctrl-C takes effect quickly."""
    for chunk in source:
        for begin in range(0, max(len(chunk), 1), _PIECE):  # an empty chunk is passed on
            if stop.is_set():
                return
            yield chunk[begin : begin + _PIECE]
