"""Between a browser and Gradio's app: checks of requests, headers and ends of responses."""

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import PlainTextResponse

_log = logging.getLogger(__name__)
# Nothing is loaded from elsewhere. Gradio's own scripts are inline, and it makes functions of strings.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'self' https://huggingface.co"
)
_KEY = re.compile("[A-Za-z0-9]{6,64}")  # of a visitor; Gradio calls it session hash


class PageConnections:
    """Gradio's app, with a content policy in its responses; all connections can be ended at once."""

    def __init__(self, app: Any):
        self._app, self._stopped = app, asyncio.Event()

    def stop(self) -> None:
        """Treat all browsers as gone."""
        self._stopped.set()

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        has_started = has_ended = False

        async def send_with_policy(message: dict) -> None:
            nonlocal has_started, has_ended
            if message["type"] == "http.response.start":
                has_started = True
                headers = [*message.get("headers", ()), (b"content-security-policy", _POLICY.encode())]
                message = message | {"headers": [*headers, (b"x-content-type-options", b"nosniff")]}
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        async def receive_until_stop() -> dict:
            tasks = [asyncio.ensure_future(waiting) for waiting in (receive(), self._stopped.wait())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                return tasks[0].result() if tasks[0].done() else {"type": "http.disconnect"}
            finally:
                for task in tasks:
                    task.cancel()

        try:
            await self._app(scope, receive_until_stop, send_with_policy)
        except Exception as error:  # of Gradio, which may have begun or sent its response
            _log.warning("The page failed at %s: %s: %s", scope["path"][:80], type(error).__name__, str(error)[:200])
            if has_started and not has_ended:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        if self._stopped.is_set() and not has_started:
            await PlainTextResponse("The server is stopping.\n", 503)(scope, receive, send)


class JoinRequests:
    """Refuses requests of events that the page does not have.

    Args:
        app: answers the other requests.
        inputs: number of each function → how many values it takes.
    """

    def __init__(self, app: Any, inputs: Mapping[int, int]):
        self._app, self._inputs = app, inputs

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        message = await receive()
        try:
            body = json.loads(message.get("body", b""))
            function, count, key = body["fn_index"], len(body["data"]), body["session_hash"]
            is_known = self._inputs.get(function) == count and _KEY.fullmatch(key) is not None
        except (ValueError, KeyError, TypeError, RecursionError):
            is_known = False
        if not is_known:
            raise HTTPException(400, "The page has no such event.")
        given = iter([message])

        async def replay() -> dict:
            return next(given, None) or await receive()

        await self._app(scope, replay, send)
