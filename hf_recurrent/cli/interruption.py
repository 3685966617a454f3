"""Ctrl-C and SIGTERM as requests to stop between two steps."""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Bytes between two checks for a request.
_PIECE = 64


class StopRequest:
    """The signal that was received, or None."""

    signal: int | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Inside the block, the first Ctrl-C or SIGTERM only sets the request; the second one acts as usual."""
    request = StopRequest()
    before = {}

    def set_request(number, frame):
        request.signal = number
        restore()

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, set_request)
    except ValueError:  # only the main thread receives signals
        pass
    try:
        yield request
    finally:
        restore()


def read_until(request: StopRequest, source: Iterable[bytes]) -> Iterator[bytes]:
    """The source in small pieces, so that Ctrl-C takes effect quickly."""
    for chunk in source:
        for begin in range(0, max(len(chunk), 1), _PIECE):  # an empty chunk is passed on
            if request.signal:
                return
            yield chunk[begin : begin + _PIECE]
