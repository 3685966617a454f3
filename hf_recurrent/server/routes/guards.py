"""The checks before the app sees a request: host, key, and the limits of its body."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

from prometheus_client import Histogram
from starlette.datastructures import Headers

from hf_recurrent.server.routes.api_keys import ApiKey, KeyRing, plain_key
from hf_recurrent.server.routes.errors import ApiError, error_response
from hf_recurrent.server.routes.page import PAGE_FILES
from hf_recurrent.server.routes.settings import ServerSettings

# Of the rest of a body that is refused: taken and forgotten.
_MOST_REFUSED = 1 << 26
_REFUSED_SECONDS, _REFUSED_IDLE_SECONDS = 5.0, 0.5
_OPEN_PATHS = ("/health", *PAGE_FILES)


class Guards:
    """An ASGI app that checks requests and passes them on, and counts them for [`ServerMetrics`]."""

    def __init__(self, app: Any, settings: ServerSettings):
        self._app, self._settings, self._limits, self._buffered = app, settings, settings.limits, 0
        self.responses: Counter[tuple[str, str, int]] = Counter()  # by method, path as declared in the app, and status
        self.requests: Counter[str] = Counter()  # by the name of the key
        self.seconds: Sequence[Histogram] = ()  # until the end, and until the first byte of the body; by path
        self.running, self.own_key = 0, secrets.token_urlsafe(24)  # a key for requests of the server itself
        own = () if settings.api_key is None else (plain_key(settings.api_key),)
        given, self._own = (*own, *settings.api_keys), plain_key(self.own_key, "server")
        self._needs_key, self._keys = bool(given), KeyRing((*given, self._own))

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # no websockets
            return None

        response, incoming, headers = _Response(send), _IncomingBody(receive), Headers(scope=scope)
        self.running += 1
        try:
            with ExitStack() as stack:
                self._check_host(headers)
                key = self._key(headers, scope["path"])
                if key is not None:
                    response.key = scope["key_name"] = key.name
                    stack.enter_context(self._keys.request(key))
                body = await self._read_body(headers, incoming)
                if body is None:  # the client has gone
                    return None
                await self._app(scope, _replayed(body, receive), response.send)
        except ApiError as error:
            await _refuse(error, incoming, response.send)
        finally:
            self._buffered -= incoming.held
            self.running -= 1
            if response.key != self._own.name:
                self._count(scope, response)

    def _count(self, scope: dict, response: "_Response") -> None:
        """Metrics and the log of a request that has ended."""
        route = scope.get("route")
        path = getattr(route, "path", "other")
        method, status, seconds = scope["method"] if route else "other", response.status, response.seconds()
        if status:
            self.responses[method, path, status] += 1
        if response.key:
            self.requests[response.key] += 1
        first = response.first_byte
        for histogram, value in zip(self.seconds, (seconds, first), strict=False):
            if value is not None:
                histogram.labels(path).observe(value)
        if self._settings.log is not None:
            self._settings.log.write(
                "request",
                id=response.id,
                method=method,
                path=path,
                status=status,
                key=response.key,
                seconds=round(seconds, 6),
                first_byte_seconds=None if first is None else round(first, 6),
                sent_bytes=response.size,
                is_complete=response.is_complete,
            )

    def _check_host(self, headers: Headers) -> None:
        hosts = self._settings.hosts
        if hosts is None:
            return
        host, origin = headers.get("host", ""), headers.get("origin")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name not in hosts:
            raise ApiError(403, "The `Host` header is not one of this server; address it as 127.0.0.1 or localhost.")
        if origin is None or "*" in self._settings.cors or origin in self._settings.cors:
            return
        if origin.partition("://")[2] != host:
            raise ApiError(403, "The `Origin` header names another site; pages of other sites have no access.")

    def _key(self, headers: Headers, path: str) -> ApiKey | None:
        """The key of a request; None where none is needed."""
        kind, _, value = headers.get("authorization", "").partition(" ")
        found = self._keys.find(value.encode("latin-1").strip()) if kind.lower() == "bearer" else None
        if found is None and self._needs_key and path not in _OPEN_PATHS:
            message = "The API key is missing or wrong; send it as `Authorization: Bearer KEY`."
            raise ApiError(401, message, code="invalid_api_key")
        return found

    async def _read_body(self, headers: Headers, incoming: "_IncomingBody") -> bytes | None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self._limits.max_body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while not incoming.is_over:
                    piece = await incoming.next()
                    if len(body) + len(piece) > self._limits.max_body:
                        raise self._too_large()
                    if self._buffered + len(piece) > self._limits.max_buffered:
                        raise ApiError(503, "The server is busy: too many bodies at a time; try again later.")
                    self._buffered += len(piece)
                    incoming.held += len(piece)
                    body += piece
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {self._limits.body_seconds:g} seconds.") from None
        return None if incoming.has_gone else bytes(body)

    def _too_large(self) -> ApiError:
        message = f"The body is too large; this server reads at most {self._limits.max_body} bytes."
        return ApiError(413, message, code="request_too_large")


class _Response:
    """The response of a request, as it is sent."""

    def __init__(self, send: Any):
        self.id = f"req_{secrets.token_hex(16)}"  # of the request, in the header `x-request-id`
        self.key: str | None = None  # name of the API key
        self.status: int | None = None
        self.first_byte: float | None = None  # seconds until the first byte of the body
        self.size, self.is_complete, self._send, self._begin = 0, False, send, time.monotonic()

    def seconds(self) -> float:
        """Since the request came."""
        return time.monotonic() - self._begin

    async def send(self, message: dict) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            message = message | {"headers": headers}
        elif message["type"] == "http.response.body":
            self.size += len(message.get("body", b""))
            if self.first_byte is None and self.size:
                self.first_byte = self.seconds()
        await self._send(message)
        self.is_complete |= message["type"] == "http.response.body" and not message.get("more_body", False)


class _IncomingBody:
    """The pieces of a request's body."""

    def __init__(self, receive: Any):
        self._receive, self.held = receive, 0  # bytes that are kept in memory
        self.is_over = self.has_gone = False  # nothing comes any more; the client has closed the connection

    async def next(self) -> bytes:
        message = await self._receive()
        self.has_gone = message["type"] == "http.disconnect"
        self.is_over = self.has_gone or not message.get("more_body", False)
        return message.get("body", b"")


async def _refuse(error: ApiError, incoming: _IncomingBody, send: Any) -> None:
    """Answer, and close the connection.

    A connection with unread bytes would be reset, and the client would lose the answer; so the rest of the body is
    taken first, within limits.
    """
    response = error_response(error, {"connection": "close"})
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    taken = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_REFUSED_SECONDS):
            while not incoming.is_over and taken < _MOST_REFUSED:
                taken += len(await asyncio.wait_for(incoming.next(), _REFUSED_IDLE_SECONDS))
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _replayed(body: bytes, receive: Any) -> Any:
    """A `receive` that returns the body, then the messages of the connection."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> dict:
        return first.pop() if first else await receive()

    return replay
