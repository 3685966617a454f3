"""The checks before the app sees a request: host, key, and the limits of its body."""

import asyncio
import hmac
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hf_recurrent.server.routes.errors import ApiError, error_response
from hf_recurrent.server.routes.page import PAGE_FILES
from hf_recurrent.server.routes.settings import ServerSettings

# Of the rest of a body that is refused: taken and forgotten.
_MOST_REFUSED = 1 << 26
_REFUSED_SECONDS, _REFUSED_IDLE_SECONDS = 5.0, 0.5
_OPEN_PATHS = ("/health", *PAGE_FILES)


class Guards:
    """An ASGI app that checks requests and passes them on.

    Args:
        app: receives the requests.
        settings: key, hosts and limits.

    Attributes:
        responses: (method, path as declared in the app, status) → how many; for [`ServerMetrics`].
    """

    def __init__(self, app: Any, settings: ServerSettings):
        self._app, self._settings, self._buffered = app, settings, 0
        self.responses: Counter[tuple[str, str, int]] = Counter()

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # no websockets
            return None

        async def send_counted(message: dict) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self.responses[scope["method"] if route else "other", path, message["status"]] += 1
            await send(message)

        incoming = _IncomingBody(receive)
        try:
            self._check_host(scope)
            self._check_key(scope)
            body = await self._read_body(scope, incoming)
            if body is None:  # the client has gone
                return None
            await self._app(scope, _replayed(body, receive), send_counted)
        except ApiError as error:
            await _refuse(error, incoming, send_counted)
        finally:
            self._buffered -= incoming.held

    def _check_host(self, scope: dict) -> None:
        hosts = self._settings.hosts
        if hosts is None:
            return
        host = next(_headers(scope, b"host"), b"").decode("latin-1")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name not in hosts:
            raise ApiError(403, "The `Host` header is not one of this server; address it as 127.0.0.1 or localhost.")
        origin = next(_headers(scope, b"origin"), None)
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            raise ApiError(403, "The `Origin` header names another site; pages of other sites have no access.")

    def _check_key(self, scope: dict) -> None:
        key = self._settings.api_key
        if key is None or scope["path"] in _OPEN_PATHS:
            return
        given = next(_headers(scope, b"authorization"), b"")
        kind, _, value = given.partition(b" ")
        # Compared in constant time, also when the lengths differ.
        if kind.lower() != b"bearer" or not hmac.compare_digest(value.strip(), key.encode()):
            message = "The API key is missing or wrong; send it as `Authorization: Bearer KEY`."
            raise ApiError(401, message, code="invalid_api_key")

    async def _read_body(self, scope: dict, incoming: "_IncomingBody") -> bytes | None:
        length = next(_headers(scope, b"content-length"), b"0")
        if length.isdigit() and int(length[:20]) > self._settings.max_body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_seconds):
                while not incoming.is_over:
                    piece = await incoming.next()
                    if len(body) + len(piece) > self._settings.max_body:
                        raise self._too_large()
                    if self._buffered + len(piece) > self._settings.max_buffered:
                        raise ApiError(503, "The server is busy: too many bodies at a time; try again later.")
                    self._buffered += len(piece)
                    incoming.held += len(piece)
                    body += piece
        except TimeoutError:
            raise ApiError(408, f"The body did not arrive within {self._settings.body_seconds:g} seconds.") from None
        return None if incoming.has_gone else bytes(body)

    def _too_large(self) -> ApiError:
        message = f"The body is too large; this server reads at most {self._settings.max_body} bytes."
        return ApiError(413, message, code="request_too_large")


class _IncomingBody:
    """The pieces of a request's body.

    Attributes:
        held: bytes that are kept in memory.
        is_over: nothing comes any more.
        has_gone: the client has closed the connection.
    """

    def __init__(self, receive: Any):
        self._receive, self.held, self.is_over, self.has_gone = receive, 0, False, False

    async def next(self) -> bytes:
        """The next piece."""
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


def _headers(scope: dict, name: bytes) -> Iterator[bytes]:
    return (value for key, value in scope["headers"] if key == name)


def _replayed(body: bytes, receive: Any) -> Any:
    """A `receive` that returns the body, then the messages of the connection."""
    is_given = False

    async def replay() -> dict:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
