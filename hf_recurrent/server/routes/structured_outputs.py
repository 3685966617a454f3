"""Constraints of new text: JSON, schemas, and calls of tools. A thread compiles them, one at a time."""

import asyncio
import json
import re
from functools import lru_cache
from typing import Any

from hf_recurrent.generation.constraints import Constraint, JsonSchemaConstraint, ToolCallConstraint, Vocabulary
from hf_recurrent.server.routes.chat_schemas import Tools
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.response_schemas import TextFormat
from hf_recurrent.server.routes.schemas import ResponseFormat
from hf_recurrent.server.routes.served_model import ServedModel

# Limits of a schema; the time to compile one grows with the square of the second one.
_MOST_BYTES, _MOST_PROPERTIES, _MOST_REPEATS = 1 << 16, 256, 256
_REPEATS = re.compile(r"\{\d*,?\d*\}")


async def text_constraint(
    served: ServedModel,
    wanted: ResponseFormat | TextFormat | None,
    param: str = "response_format",
    tools: Tools | None = None,
) -> Constraint | None:
    """The constraint of a text that may call tools, or has the form of the argument `param`; None for a free text.

    Raises an ApiError if a schema cannot be enforced, the library is missing, or tools and form do not go together.
    """
    if tools is None or not tools.may_call:
        schema = None if wanted is None else wanted.schema
        return None if schema is None else await _constraint(served, JsonSchemaConstraint, schema, param, param)
    is_required = tools.choice.mode == "required"
    if wanted is not None and wanted.type != "text" and not is_required:
        message = "A form of the text does not go with `tools`, unless `tool_choice` is 'none' or 'required'."
        raise ApiError(400, message, "tools", "unsupported_value")
    options = {"is_required": is_required, "is_single": not tools.is_parallel}
    # Without the library, calls are found in the text, whatever their arguments.
    needed_by = "tool_choice" if is_required else None
    return await _constraint(served, ToolCallConstraint, tools.schemas, "tools", needed_by, **options)


async def _constraint(
    served: ServedModel, kind: type[Constraint], schema: Any, param: str, needed_by: str | None, **options: bool
) -> Constraint | None:
    """The constraint of an argument; where the library is missing, an error of the argument that needs it, or None."""
    try:
        text, end = _checked(schema), next(iter(served.scheduler.end_tokens), 0)
        async with served.compiling:
            return await asyncio.to_thread(_compiled, kind, text, served.vocabulary, end, **options)
    except ImportError as error:
        if needed_by is None:
            return None
        raise ApiError(400, f"`{needed_by}` is not supported: {error}", needed_by, "unsupported_value") from error
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply." if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"`{param}` cannot be enforced: {reason}", param, "invalid_json_schema") from error


@lru_cache(maxsize=32)
def _compiled(kind: type[Constraint], text: str, vocabulary: Vocabulary, end: int, **options: bool) -> Constraint:
    return kind(json.loads(text), end_token_id=end, vocabulary=vocabulary, **options)


def _checked(schema: Any) -> str:
    """A schema as JSON; raises a ValueError if it is too large to compile."""
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
