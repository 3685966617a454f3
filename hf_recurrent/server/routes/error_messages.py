"""Sentences about bodies that are refused, with `param` and `code` as OpenAI has them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Of OpenAI and of other servers. Every other unknown argument is a mistake.
_UNSUPPORTED = frozenset({
    "audio", "conversation", "documents", "function_call", "functions", "guided_json", "guided_regex",
    "length_penalty", "max_completion_tokens", "max_tool_calls", "messages", "metadata", "min_tokens", "modalities",
    "parallel_tool_calls", "prediction", "prompt_logprobs", "reasoning", "reasoning_effort", "response_format",
    "service_tier", "stop_token_ids", "store", "tool_choice", "tools", "top_logprobs", "truncate_prompt_tokens",
    "typical_p", "verbosity", "web_search_options",
})  # fmt: skip
_TYPES = {
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
_PROMPT = "a string, a list of strings, a list of token ids, or a list of such lists"
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


class Refusal(NamedTuple):
    """One sentence, the argument at fault, and a word for programs."""

    message: str
    param: str | None = None
    code: str | None = None


def refusal(found: Sequence[Mapping[str, Any]], content_type: str | None) -> Refusal:
    """The first of pydantic's errors about a request."""
    first = found[0]
    kind, place = first["type"], first["loc"][1:]
    if kind == "json_invalid":
        return Refusal("The body is not valid JSON.")
    if not place:
        return _about_body(first, content_type)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
    if place[0] == "prompt":
        return Refusal(f"`prompt` must be {_PROMPT}.", "prompt", "invalid_type")
    if kind == "extra_forbidden":
        return _unknown(param)
    if kind == "missing":
        return Refusal(f"The argument `{param}` is missing.", param, "missing_required_parameter")
    return _wrong_value(param, first)


def _about_body(error: Mapping[str, Any], content_type: str | None) -> Refusal:
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        if error["type"] == "missing":
            return Refusal("The body is empty; it must be a JSON object.")
        if error["type"] == "value_error":
            return Refusal(f"{_sentence(error)[0].upper()}{_sentence(error)[1:]}.")
        return Refusal(f"The body is {_shown(error['input'])}; it must be a JSON object.")
    has = f"`Content-Type` is {kind[:80]!r}" if kind else "`Content-Type` is missing"
    return Refusal(f"The header {has}; it must be 'application/json'.")


def _unknown(param: str) -> Refusal:
    if param in _UNSUPPORTED:
        return Refusal(f"`{param}` is not supported by this server.", param, "unsupported_parameter")
    return Refusal(f"Unrecognized argument `{param[:80]}`.", param[:80], "unknown_parameter")


def _wrong_value(param: str, error: Mapping[str, Any]) -> Refusal:
    kind, context, shown = error["type"], error.get("ctx", {}), _shown(error["input"])
    if kind == "literal_error":
        message = f"`{param}` is {shown}, which is not supported; only {context['expected']} is."
        return Refusal(message, param, "unsupported_value")
    if kind in _TYPES:
        return Refusal(f"`{param}` is {shown}; it must be {_TYPES[kind]}.", param, "invalid_type")
    if kind in _LIMITS:
        words, name, code = _LIMITS[kind]
        limit = context[name]
        number = "integer" if isinstance(limit, int) else "decimal"
        return Refusal(f"`{param}` is {shown}; it must be {words} {_shown(limit)}.", param, f"{number}_{code}")
    if kind in _LENGTHS:
        words, code = _LENGTHS[kind]
        return Refusal(f"`{param}` has {words.format(**context)}.", param, code)
    return Refusal(f"`{param}` is {shown}: {_sentence(error)}.", param, "invalid_value")


def _sentence(error: Mapping[str, Any]) -> str:
    return str(error["msg"]).removeprefix("Value error, ").rstrip(".")


def _shown(value: Any) -> str:
    """A value as JSON, cut."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
