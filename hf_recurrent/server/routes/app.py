"""The app: all routes behind the guards, and the server that runs it."""

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hf_recurrent.server.routes.errors import add_error_handlers
from hf_recurrent.server.routes.guards import Guards
from hf_recurrent.server.routes.metrics import ServerMetrics, request_histograms
from hf_recurrent.server.routes.openai_api import openai_routes
from hf_recurrent.server.routes.page import page_routes
from hf_recurrent.server.routes.responses_api import responses_routes
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.routes.session_api import learning_routes, session_routes

_MOST_CONNECTIONS = 1024
_KEEP_ALIVE_SECONDS = 15
_SHUTDOWN_SECONDS = 5  # to send what is left
_WARM_UP_REQUESTS = 5


def build_app(served: ServedModel) -> Guards:
    """The ASGI app of a model, which closes the scheduler when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        served.scheduler.close()

    app = FastAPI(title="hf-recurrent", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    add_error_handlers(app)
    guards, registry = Guards(app, served.settings), CollectorRegistry()
    registry.register(ServerMetrics(served, guards))
    guards.seconds = request_histograms(registry)

    @app.get("/health")
    async def health() -> JSONResponse:
        is_alive = served.scheduler.is_alive
        return JSONResponse({"status": "ok" if is_alive else "stopped"}, 200 if is_alive else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    kinds = (openai_routes, responses_routes, session_routes, learning_routes)
    for routes in kinds if served.settings.has_sessions else kinds[:2]:
        app.include_router(routes(served))
    if served.settings.has_page:
        app.include_router(page_routes())
    return guards


class TimedProtocol(AutoHTTPProtocol):
    """uvicorn's protocol with time limits for sending headers and for taking a response: it waits for both forever."""

    header_seconds, send_seconds = 15.0, 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._header_timer = self._send_timer = None
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
        self._send_timer = self.loop.call_later(self.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _watch_headers(self) -> None:
        """Start the clock when headers are awaited, stop it when the app has the request."""
        are_awaited = self.cycle is None or self.cycle.response_complete
        if are_awaited and self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_seconds, self.transport.abort)
        elif not are_awaited and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _Server(uvicorn.Server):
    """A server that ends its requests where they are, after their time is up, and lets them send what they have."""

    def __init__(self, config: uvicorn.Config, served: ServedModel):
        super().__init__(config)
        self._served = served

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        seconds, scheduler = self._served.settings.limits.stop_seconds, self._served.scheduler
        timer = asyncio.get_running_loop().call_later(seconds, scheduler.end_all)
        await super().shutdown(sockets)
        timer.cancel()


def http_server(served: ServedModel, app: Guards) -> uvicorn.Server:
    cors = {"allow_methods": ["GET", "POST", "PATCH", "DELETE"], "allow_headers": ["*"]}
    cors |= {"allow_origins": served.settings.cors, "expose_headers": ["x-request-id", "retry-after"]}
    config = uvicorn.Config(
        CORSMiddleware(app, **cors) if served.settings.cors else app,
        http=TimedProtocol,
        ws="none",
        access_log=False,
        server_header=False,
        log_level="warning",
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(served.settings.limits.stop_seconds + _SHUTDOWN_SECONDS),
    )
    return _Server(config, served)


def run_server(served: ServedModel, listener: socket.socket, report: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM, and close the socket.

    `report` is called once the first requests would be answered without delay.
    """
    app = build_app(served)
    asyncio.run(_warm_up(app, served))
    report()
    with listener, suppress(KeyboardInterrupt):  # uvicorn raises it again, after a graceful end
        http_server(served, app).run(sockets=[listener])


async def _warm_up(app: Guards, served: ServedModel) -> None:
    """Answer some requests, because the first ones of a process take several times as long as later ones."""
    settings, shortest = served.settings, served.scheduler.steps.shortest_prefix
    # The first prompt is too short to have a stored state, so it is read; the other one is read by the first server.
    prompts = [[0] * (shortest - 2), [0] * (2 * shortest + 16)]
    content = {"model": settings.name, "prompt": prompts, "max_tokens": 2, "logit_bias": {"0": -1.0}}
    headers = {"host": (settings.hosts or ("localhost",))[0], "authorization": f"Bearer {app.own_key}"}
    headers["content-type"] = "application/json"
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/completions", "query_string": b""}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    incoming: asyncio.Queue[dict] = asyncio.Queue()

    async def send(message: dict) -> None:
        pass

    for _ in range(_WARM_UP_REQUESTS):
        incoming.put_nowait({"type": "http.request", "body": json.dumps(content).encode()})
        await app(dict(scope), incoming.get, send)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises an OSError that names the arguments."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Connections inherit it. asyncio sets it only on sockets that were made with IPPROTO_TCP, and without it, a
        # response on a kept-alive connection waits for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise OSError(f"`--host` is {host!r} and `--port` {port}; that address cannot be used: {error}.") from error
