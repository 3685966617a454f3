"""Checks of regular expressions and JSON schemas: refuse parts that the grammar library would not enforce.

xgrammar ignores keywords of JSON Schema that it does not know, and anchors within an expression.
"""

import re
from collections.abc import Mapping
from typing import Any

_ATOM = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_REFUSED_ESCAPES = re.compile(r"\\[AZzBb0-9NU]|\\x00|\\u0000")
# Characters that JSON strings have to escape.
_ESCAPED_IN_JSON = [*map(chr, range(32)), '"', "\\"]

_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
_ANNOTATIONS |= {"deprecated", "readOnly", "writeOnly"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems"}
_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": _NUMBER,
    "number": _NUMBER,
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    "boolean": set(),
    "null": set(),
}
# Of these, the library enforces one at a time.
_EXCLUSIVE = (
    {"pattern", "format", "minLength"},
    {"pattern", "format", "maxLength"},
    {"minimum", "exclusiveMinimum"},
    {"maximum", "exclusiveMaximum"},
)
_TYPES = {"string": str, "integer": int, "number": int | float, "array": list, "object": dict}
_TYPES |= {"boolean": bool, "null": type(None)}


def checked_pattern(pattern: str, name: str = "pattern") -> str:
    """The expression in the form that the library reads as `re.fullmatch(pattern, text, re.ASCII)` does.

    Raises a ValueError if it is invalid, or has an anchor within it or an escape that is not supported.
    """
    try:
        re.compile(pattern, re.ASCII)
    except re.error as error:
        raise ValueError(f"`{name}` is {pattern!r}, which is not a regular expression: {error}.") from error
    atoms = _ATOM.findall(pattern)
    for place, atom in enumerate(atoms):
        anchor = (atom == "^" and place > 0) or (atom == "$" and place < len(atoms) - 1)
        if anchor or "\0" in atom or (atom[0] in "\\[" and _REFUSED_ESCAPES.search(atom.replace("\\\\", ""))):
            raise ValueError(f"`{name}` is {pattern!r}; {atom!r} is not supported there.")
    # The library's dot is every character.
    return "".join(r"[^\n]" if atom == "." else atom for atom in atoms)


def check_schema(schema: Any, name: str = "schema") -> None:
    """Raise a ValueError that names the first part of a JSON schema that could not be enforced."""
    if isinstance(schema, bool):
        return
    _require(isinstance(schema, Mapping), name, schema, "an object or a boolean")
    for key in ("$defs", "definitions"):
        for child, value in _mapping(schema, key, name).items():
            check_schema(value, f"{name}.{key}.{child}")
    keywords = schema.keys() - _ANNOTATIONS
    if "$ref" in keywords:
        _check_known(keywords, {"$ref"}, name)
        reference = schema["$ref"]
        is_local = isinstance(reference, str) and reference.startswith("#/")
        _require(is_local, f"{name}.$ref", reference, "a reference that begins with '#/'")
    elif "anyOf" in keywords:
        _check_known(keywords, {"anyOf"}, name)
        for place, choice in enumerate(_non_empty(schema, "anyOf", name)):
            check_schema(choice, f"{name}.anyOf.{place}")
    elif "enum" in keywords:
        _check_known(keywords, {"enum", "type"}, name)
        _check_values(schema, _non_empty(schema, "enum", name), name)
    elif "const" in keywords:
        _check_known(keywords, {"const", "type"}, name)
        _check_values(schema, [schema["const"]], name)
    elif keywords:
        _check_typed(schema, keywords, name)


def _check_typed(schema: Mapping, keywords: set[str], name: str) -> None:
    types = _types(schema, name)
    _check_known(keywords, {"type"}.union(*(_KEYWORDS[kind] for kind in types)), name)
    for exclusive in _EXCLUSIVE:
        if len(found := sorted(keywords & exclusive)) > 1:
            raise ValueError(f"`{name}` has {' and '.join(map(repr, found))}; only one of them can be enforced.")
    for key in _COUNTS & keywords:
        is_count = _is_a("integer", schema[key]) and schema[key] >= 0
        _require(is_count, f"{name}.{key}", schema[key], "an integer of at least 0")
    for key in _NUMBER & keywords:
        _require(_is_a("number", schema[key]), f"{name}.{key}", schema[key], "a number")
    if "pattern" in keywords:
        _check_string_pattern(schema["pattern"], f"{name}.pattern")
    properties, prefix = _mapping(schema, "properties", name), schema.get("prefixItems", [])
    if missing := [key for key in schema.get("required", ()) if key not in properties]:
        raise ValueError(f"`{name}.required` has {missing[0]!r}, which is not one of the properties.")
    _require(isinstance(prefix, list), f"{name}.prefixItems", prefix, "a list")
    children = {f"properties.{key}": value for key, value in properties.items()}
    children |= {key: schema[key] for key in ("items", "additionalProperties") if key in keywords}
    children |= {f"prefixItems.{place}": value for place, value in enumerate(prefix)}
    for key, value in children.items():
        check_schema(value, f"{name}.{key}")


def _check_values(schema: Mapping, values: list, name: str) -> None:
    types = _types(schema, name) if "type" in schema else list(_TYPES)
    for value in values:
        if not any(_is_a(kind, value) for kind in types):
            raise ValueError(f"`{name}` has the value {value!r}, which is not of type {schema['type']!r}.")


def _check_string_pattern(pattern: Any, name: str) -> None:
    """Refuse characters that a JSON string has to escape: the expression describes the unescaped text."""
    _require(isinstance(pattern, str), name, pattern, "a regular expression")
    checked_pattern(pattern, name)
    for atom in _ATOM.findall(pattern):
        # Alone, these are no expressions.
        if atom not in "^$|?*+(){}" and any(re.fullmatch(atom, c, re.ASCII) for c in _ESCAPED_IN_JSON):
            raise ValueError(f"`{name}` is {pattern!r}; {atom!r} may be a quote, a backslash or a control character.")


def _check_known(keywords: set[str], known: set[str], name: str) -> None:
    if unknown := sorted(keywords - known):
        others = ", ".join(sorted(known))
        raise ValueError(f"`{name}` has {unknown[0]!r}, which cannot be enforced there; it may have {others}.")


def _is_a(kind: str, value: Any) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _types(schema: Mapping, name: str) -> list[str]:
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given
    is_known = isinstance(types, list) and types and all(isinstance(kind, str) and kind in _TYPES for kind in types)
    _require(bool(is_known), f"{name}.type", given, f"one or several of {', '.join(_TYPES)}")
    return types


def _mapping(schema: Mapping, key: str, name: str) -> Mapping:
    found = schema.get(key, {})
    _require(isinstance(found, Mapping), f"{name}.{key}", found, "an object")
    return found


def _non_empty(schema: Mapping, key: str, name: str) -> list:
    found = schema[key]
    _require(isinstance(found, list) and bool(found), f"{name}.{key}", found, "a list that is not empty")
    return found


def _require(is_allowed: bool, name: str, value: Any, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"`{name}` is {value!r}; it must be {allowed}.")
