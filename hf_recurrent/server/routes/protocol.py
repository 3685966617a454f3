"""Closes connections that send nothing or take nothing: uvicorn waits for both forever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_HEADER_SECONDS = 15.0
_SEND_SECONDS = 60.0


class TimedProtocol(AutoHTTPProtocol):
    """uvicorn's protocol with time limits for sending a request's headers and for taking a response."""

    header_seconds, send_seconds = _HEADER_SECONDS, _SEND_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._connection, self._header_timer, self._send_timer = transport, None, None
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._send_timer = loop.call_later(self.send_seconds, self._connection.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _watch_headers(self) -> None:
        """Start the clock when headers are awaited, stop it when the app has the request."""
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
        elif self._header_timer is None:
            loop = asyncio.get_running_loop()
            self._header_timer = loop.call_later(self.header_seconds, self._connection.abort)
