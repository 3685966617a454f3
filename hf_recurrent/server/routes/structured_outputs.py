"""Constraints of new text: JSON, schemas, and calls of tools. A thread compiles them, one at a time."""

import asyncio
import json
import re
from functools import lru_cache
from typing import Any

from hf_recurrent.generation.constraints import Constraint, JsonSchemaConstraint, ToolCallConstraint, Vocabulary
from hf_recurrent.server.routes.chat_schemas import Tools
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.schemas import ResponseFormat
from hf_recurrent.server.routes.served_model import ServedModel

# Limits of a schema; the time to compile one grows with the square of the second one.
_MOST_BYTES, _MOST_PROPERTIES, _MOST_REPEATS = 1 << 16, 256, 256
_REPEATS = re.compile(r"\{\d*,?\d*\}")


async def format_constraint(
    served: ServedModel, wanted: ResponseFormat | None, param: str = "response_format"
) -> Constraint | None:
    """The constraint of a `response_format`.

    Raises:
        ApiError: the schema cannot be enforced, or the library is missing.
    """
    schema = None if wanted is None else wanted.schema
    if schema is None:
        return None
    return await _constraint(param, served, "schema", schema)


async def tools_constraint(served: ServedModel, tools: Tools, wanted: ResponseFormat | None) -> Constraint | None:
    """The constraint of a text that may call tools; None where it may not.

    Raises:
        ApiError: as in [`format_constraint`].
    """
    if not tools.may_call:
        return None
    is_required = tools.choice.mode == "required"
    if wanted is not None and wanted.type != "text" and not is_required:
        message = "A form of the text does not go with `tools`, unless `tool_choice` is 'none' or 'required'."
        raise ApiError(400, message, "tools", "unsupported_value")
    try:
        return await _constraint("tools", served, "tools", tools.schemas, is_required, not tools.is_parallel)
    except ImportError as error:
        if is_required:
            message = f"`tool_choice` is not supported: {error}"
            raise ApiError(400, message, "tool_choice", "unsupported_value") from error
        return None  # calls are found in the text, whatever their arguments


async def _constraint(param: str, served: ServedModel, kind: str, schema: Any, *options: bool) -> Constraint:
    try:
        text = _checked(schema)
        async with served.compiling:
            ends = served.scheduler.end_tokens
            return await asyncio.to_thread(_compiled, kind, text, served.vocabulary, next(iter(ends), 0), *options)
    except ImportError as error:
        if kind == "tools":
            raise
        raise ApiError(400, f"`{param}` is not supported: {error}", param, "unsupported_value") from error
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply." if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"`{param}` cannot be enforced: {reason}", param, "invalid_json_schema") from error


@lru_cache(maxsize=32)
def _compiled(kind: str, text: str, vocabulary: Vocabulary, end: int, *options: bool) -> Constraint:
    schema = json.loads(text)
    if kind == "tools":
        return ToolCallConstraint(schema, *options, end_token_id=end, vocabulary=vocabulary)
    return JsonSchemaConstraint(schema, end, vocabulary)


def _checked(schema: Any) -> str:
    """A schema as JSON, if it is not too large to compile.

    Raises:
        ValueError: it is.
    """
    text = json.dumps(schema)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"it has {len(text)} bytes as JSON; at most {_MOST_BYTES} are allowed.")
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            properties, pattern = part.get("properties"), part.get("pattern")
            if isinstance(properties, dict) and len(properties) > _MOST_PROPERTIES:
                raise ValueError(f"an object has {len(properties)} properties; it may have {_MOST_PROPERTIES}.")
            numbers = re.findall(r"\d+", " ".join(_REPEATS.findall(pattern if isinstance(pattern, str) else "")))
            if any(int(number[:9]) > _MOST_REPEATS for number in numbers):
                raise ValueError(f"`pattern` repeats a part more than {_MOST_REPEATS} times.")
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return text
