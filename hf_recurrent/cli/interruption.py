"""Reading a stream until Ctrl-C or SIGTERM asks to stop."""

from collections.abc import Iterable, Iterator
from threading import Event

# Bytes between two checks for a request.
_PIECE = 64


def read_until(stop: Event, source: Iterable[bytes]) -> Iterator[bytes]:
    """The source in small pieces, so that Ctrl-C takes effect quickly."""
    for chunk in source:
        for begin in range(0, max(len(chunk), 1), _PIECE):  # an empty chunk is passed on
            if stop.is_set():
                return
            yield chunk[begin : begin + _PIECE]
