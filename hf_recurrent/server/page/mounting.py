"""Mounts the page in the server's app: only the addresses of Gradio that a browser needs.

Gradio's addresses for files, uploads, proxies and tools are not reachable at all.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from starlette.routing import Route

from hf_recurrent.server.page.connections import JoinRequests, PageConnections
from hf_recurrent.server.page.visitor import MOST_VISITORS
from hf_recurrent.server.routes.served_model import ServedModel

_JOIN = "/gradio_api/queue/join"
_ADDRESSES = (
    ("/", ("GET", "HEAD")),
    ("/config", ("GET",)),
    ("/favicon.ico", ("GET",)),
    ("/theme.css", ("GET",)),
    ("/assets/{path:path}", ("GET",)),
    ("/static/{path:path}", ("GET",)),
    (_JOIN, ("POST",)),
    ("/gradio_api/queue/data", ("GET",)),
    ("/gradio_api/cancel", ("POST",)),
    ("/gradio_api/heartbeat/{session_hash}", ("GET",)),
)


@dataclass(frozen=True)
class MountedPage:
    """A page in an app.

    Args:
        paths: its addresses, and beginnings of them that end with "/"; none without Gradio.
        life: a context, as long as the server runs.
        stop: ends the connections that browsers hold open, so that the server can.
    """

    paths: tuple[str, ...] = ()
    life: AbstractAsyncContextManager[Any] = field(default_factory=nullcontext)
    stop: Callable[[], None] = lambda: None


def mount_page(app: FastAPI, served: ServedModel) -> MountedPage:
    """Add the page at `/`, or a sentence on how to install it."""
    if not served.settings.has_page:
        return MountedPage()
    try:
        import gradio as gr

        from hf_recurrent.server.page.layout import SCRIPT, STYLE, Page
    except ImportError as error:
        return _mount_sentence(app, error)

    page, inner = Page(served), FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # Gradio keeps 140 kB for each of the last visitors, 10,000 by default.
    page.blocks.state_session_capacity = MOST_VISITORS
    fonts = [gr.themes.Font(name) for name in ("system-ui", "sans-serif")]
    mono = [gr.themes.Font(name) for name in ("ui-monospace", "monospace")]
    gr.mount_gradio_app(
        inner,
        page.blocks,
        path="/",
        theme=gr.themes.Default(primary_hue="blue", neutral_hue="stone", font=fonts, font_mono=mono),
        css=STYLE,
        head=f"<script>{SCRIPT}</script>",
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        show_error=False,
    )
    connections = PageConnections(inner)
    joining = JoinRequests(connections, page.inputs)
    for path, methods in _ADDRESSES:
        endpoint = joining if path == _JOIN else connections
        app.router.routes.append(Route(path, endpoint, methods=list(methods), include_in_schema=False))
    paths = tuple(path.partition("{")[0] for path, _ in _ADDRESSES)
    return MountedPage(paths, inner.router.lifespan_context(inner), connections.stop)


def _mount_sentence(app: FastAPI, error: ImportError) -> MountedPage:
    @app.get("/")
    async def how_to_install() -> PlainTextResponse:
        return PlainTextResponse(
            'For a page to write, fork and rewind texts here, run pip install "hf-recurrent[page]" and restart the '
            f"server ({error}).\n"
        )

    return MountedPage()
