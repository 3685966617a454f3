"""The key for people: typed once into a form, then a cookie, which opens the page and nothing else."""

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

_COOKIE = "hf_recurrent_page"
_LOGIN = "/login"
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'self'"
_FORM = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>Key</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 24rem; margin: 15vh auto; padding: 0 1rem; }}
input, button {{ font: inherit; padding: 0.4rem 0.7rem; margin-top: 0.4rem; }}
input {{ display: block; width: 100%; box-sizing: border-box; }}
</style>
</head>
<body>
<form method="post" action="/login">
<label for="key">API key of this server</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button>Open the page</button>
<p role="alert">{message}</p>
</form>
</body>
</html>
"""


class PageAccess:
    """Who may see the page of a server.

    Args:
        api_key: of the server; None if everybody may.
        paths: addresses of the page, and prefixes of them that end with "/"; none if there is no page.

    Attributes:
        has_page: there is a page.
        open_paths: addresses that need no key.
    """

    def __init__(self, api_key: str | None, paths: tuple[str, ...]):
        self._api_key, self._paths, self.has_page = api_key, paths, bool(paths)
        self._token = secrets.token_urlsafe(32)  # a new one in each process
        self.open_paths = ("/health", _LOGIN) if self.has_page else ("/health", "/")

    def admits(self, scope: dict) -> bool:
        """True if a request is for the page and has the cookie."""
        folders = tuple(each for each in self._paths if each.endswith("/") and each != "/")
        if scope["path"] not in self._paths and not scope["path"].startswith(folders):
            return False
        headers = (value for name, value in scope["headers"] if name == b"cookie")
        try:
            cookies = SimpleCookie(b"; ".join(headers).decode("latin-1"))
        except CookieError:
            return False
        given = cookies[_COOKIE].value if _COOKIE in cookies else ""
        return hmac.compare_digest(given.encode("latin-1", "replace"), self._token.encode())

    def wants_login(self, scope: dict) -> bool:
        """True if a person has opened the page and has no cookie yet."""
        has_header = any(name == b"authorization" for name, _ in scope["headers"])
        return self.has_page and scope["method"] == "GET" and scope["path"] == "/" and not has_header

    def login_response(self) -> Response:
        """The way to the form."""
        return RedirectResponse(_LOGIN, 303, {"cache-control": "no-store"})

    def routes(self) -> APIRouter:
        """The form; none where no key is needed."""
        routes = APIRouter()
        if self._api_key is None or not self.has_page:
            return routes

        @routes.get(_LOGIN, include_in_schema=False)
        async def form() -> HTMLResponse:
            return _form()

        @routes.post(_LOGIN, include_in_schema=False)
        async def login(request: Request) -> Response:
            fields = parse_qs((await request.body()).decode("utf-8", "replace"))
            given = fields.get("key", [""])[0].strip()
            if not hmac.compare_digest(given.encode(), self._api_key.encode()):
                return _form("That is not the key of this server.", 401)
            response = RedirectResponse("/", 303)
            is_secure = request.url.scheme == "https"
            response.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict", secure=is_secure)
            return response

        return routes


def _form(message: str = "", status: int = 200) -> HTMLResponse:
    headers = {"content-security-policy": _POLICY, "cache-control": "no-store"}
    return HTMLResponse(_FORM.format(message=message), status, headers)
