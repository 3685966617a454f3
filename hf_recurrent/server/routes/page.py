"""The page for people at `/`: static files, which use the HTTP API as every other client does."""

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

_FOLDER = Path(__file__).parents[1] / "page"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
# Nothing from elsewhere, nothing inline. The Hub shows a Space in a frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'self' https://huggingface.co"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# Address → file; readable without a key, which the page asks for.
PAGE_FILES = {
    "/" if file.suffix == ".html" else f"/page/{file.name}": file
    for file in sorted(_FOLDER.iterdir())
    if file.suffix in _KINDS
}


def page_routes() -> APIRouter:
    routes = APIRouter()
    for path, file in PAGE_FILES.items():
        _add_file(routes, path, file.read_bytes(), _KINDS[file.suffix])
    return routes


def _add_file(routes: APIRouter, path: str, content: bytes, kind: str) -> None:
    @routes.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)
    async def page_file() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)
