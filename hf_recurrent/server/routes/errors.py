"""Errors as OpenAI's API writes them: one sentence in JSON, never a traceback."""

import logging
import sqlite3
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hf_recurrent.server.routes.error_messages import refusal
from hf_recurrent.server.scheduler import TimeIsUp
from hf_recurrent.server.session_store import SessionBusy, SessionError, Stopped, TooMany, UnknownSession

_log = logging.getLogger(__name__)
# The others are "invalid_request_error" or, from 500 on, "server_error".
_TYPES = {403: "permission_error", 429: "requests"}
_STATUS_AND_CODE = {
    UnknownSession: (404, "session_not_found"),
    SessionBusy: (409, "session_busy"),
    Stopped: (409, "session_stopped"),
    TooMany: (429, "rate_limit_exceeded"),
    TimeIsUp: (503, "server_overloaded"),
}
_RETRY_SECONDS = "1"
ABOVE_LIMIT = "integer_above_max_value"


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of an error; one that is not the client's fault is logged and says nothing."""
    if isinstance(error, ApiError):
        return _body(error.status, error.message, error.param, error.code)
    if isinstance(error, SessionError | TimeIsUp):
        status, code = _STATUS_AND_CODE.get(type(error), (400, None))
        return _body(status, str(error), code=code)
    _log.error("A request failed.", exc_info=error)
    if isinstance(error, OSError | sqlite3.Error):
        return _body(507, "The session cannot be written: the disk of the server is full or damaged.")
    return _body(500, "The server failed at this request; its log says more.")


def error_response(error: Exception, headers: Mapping[str, str] | None = None) -> JSONResponse:
    status, body = error_body(error)
    own = getattr(error, "headers", None) or ({"retry-after": _RETRY_SECONDS} if status in (429, 503) else {})
    return JSONResponse(body, status, {**own, **(headers or {})})


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of an app in this form."""

    @app.exception_handler(RequestValidationError)
    async def refuse_values(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(ApiError(400, *refusal(error.errors(), request.headers.get("content-type"))))

    @app.exception_handler(HTTPException)
    async def refuse(request: Request, error: HTTPException) -> JSONResponse:
        message = {404: "There is no such address.", 405: "The address does not allow this method."}
        found = ApiError(error.status_code, message.get(error.status_code, str(error.detail)))
        return error_response(found, error.headers)

    async def refuse_any(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    for kind in (ApiError, SessionError, TimeIsUp, OSError, sqlite3.Error, Exception):
        app.add_exception_handler(kind, refuse_any)


def _body(status: int, message: str, param: str | None = None, code: str | None = None) -> tuple[int, dict[str, Any]]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = message.encode(errors="replace").decode()  # a quoted value may have lone surrogates
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}
