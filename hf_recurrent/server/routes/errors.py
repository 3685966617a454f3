"""Errors as OpenAI's API writes them: one sentence in JSON, never a traceback, with `param` and `code`."""

import json
import logging
import sqlite3
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

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
        self, status: int, message: str, param: str | None = None, code: str | None = None, headers: Any = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}


_refused = partial(ApiError, 400)


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
        return error_response(_refusal(error.errors()[0], request.headers.get("content-type")))

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


# Of OpenAI and of other servers. Every other unknown argument is a mistake.
_UNSUPPORTED = frozenset({
    "audio", "conversation", "documents", "function_call", "functions", "guided_json", "guided_regex",
    "length_penalty", "max_completion_tokens", "max_tool_calls", "messages", "metadata", "min_tokens", "modalities",
    "parallel_tool_calls", "prediction", "prompt_logprobs", "reasoning", "reasoning_effort", "response_format",
    "service_tier", "stop_token_ids", "store", "tool_choice", "tools", "top_logprobs", "truncate_prompt_tokens",
    "typical_p", "verbosity", "web_search_options",
})  # fmt: skip
_KINDS = {
    "bool_type": "a boolean",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a string",
}
# pydantic's type of error → what is allowed, and OpenAI's code after the kind of number.
_LIMITS = {
    "greater_than_equal": ("at least", "ge", "below_min_value"),
    "greater_than": ("more than", "gt", "below_min_value"),
    "less_than_equal": ("at most", "le", "above_max_value"),
    "less_than": ("less than", "lt", "above_max_value"),
}
_LENGTHS = {
    "too_long": ("{actual_length} items; at most {max_length} are allowed", "array_above_max_length"),
    "too_short": ("{actual_length} items; at least {min_length} are needed", "array_below_min_length"),
    "string_too_long": ("more than {max_length} characters", "string_above_max_length"),
    "string_too_short": ("fewer than {min_length} characters", "string_below_min_length"),
}


def _refusal(error: Mapping[str, Any], content_type: str | None) -> ApiError:
    """One of pydantic's errors about a request."""
    kind, place = error["type"], error["loc"][1:]
    if kind == "json_invalid":
        return _refused("The body is not valid JSON.")
    if not place:
        return _about_body(error, content_type)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    if place[0] == "prompt":
        message = "`prompt` must be a string, a list of strings, a list of token ids, or a list of such lists."
        return _refused(message, "prompt", "invalid_type")
    if kind == "extra_forbidden":
        if param in _UNSUPPORTED:
            return _refused(f"`{param}` is not supported by this server.", param, "unsupported_parameter")
        return _refused(f"Unrecognized argument `{param[:80]}`.", param[:80], "unknown_parameter")
    if kind == "missing":
        return _refused(f"The argument `{param}` is missing.", param, "missing_required_parameter")
    return _wrong_value(param, error)


def _about_body(error: Mapping[str, Any], content_type: str | None) -> ApiError:
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        if error["type"] == "missing":
            return _refused("The body is empty; it must be a JSON object.")
        if error["type"] == "value_error":
            return _refused(f"{_sentence(error)[0].upper()}{_sentence(error)[1:]}.")
        return _refused(f"The body is {_shown(error['input'])}; it must be a JSON object.")
    has = f"`Content-Type` is {kind[:80]!r}" if kind else "`Content-Type` is missing"
    return _refused(f"The header {has}; it must be 'application/json'.")


def _wrong_value(param: str, error: Mapping[str, Any]) -> ApiError:
    kind, context, shown = error["type"], error.get("ctx", {}), _shown(error["input"])
    if kind == "literal_error":
        message = f"`{param}` is {shown}, which is not supported; only {context['expected']} is."
        return _refused(message, param, "unsupported_value")
    if kind in _KINDS:
        return _refused(f"`{param}` is {shown}; it must be {_KINDS[kind]}.", param, "invalid_type")
    if kind in _LIMITS:
        words, name, code = _LIMITS[kind]
        number = "integer" if isinstance(limit := context[name], int) else "decimal"
        return _refused(f"`{param}` is {shown}; it must be {words} {_shown(limit)}.", param, f"{number}_{code}")
    if kind in _LENGTHS:
        words, code = _LENGTHS[kind]
        return _refused(f"`{param}` has {words.format(**context)}.", param, code)
    return _refused(f"`{param}` is {shown}: {_sentence(error)}.", param, "invalid_value")


def _sentence(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ").rstrip(".")


def _shown(value: Any) -> str:
    """A value as JSON, cut."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
