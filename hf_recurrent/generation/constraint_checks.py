"""Checks of regular expressions and JSON schemas: what the grammar library would read in another way is refused.

xgrammar ignores keywords of JSON Schema that it does not enforce, and anchors within an expression.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_ATOM = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_REFUSED_ESCAPES = re.compile(r"\\[AZzBb0-9NU]|\\x00|\\u0000")
# Characters that JSON strings have to escape.
_ESCAPED_IN_JSON = [*map(chr, range(32)), '"', "\\"]

_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
_ANNOTATIONS |= {"deprecated", "readOnly", "writeOnly"}
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
_TYPES = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}


def checked_pattern(pattern: str, name: str = "pattern") -> str:
    """The expression in the form that the library reads as `re.fullmatch(pattern, text, re.ASCII)` does.

    Raises:
        ValueError: the expression is invalid, or has an anchor within it or an escape that is not supported.
    """
    try:
        re.compile(pattern, re.ASCII)
    except re.error as error:
        raise ValueError(f"`{name}` is {pattern!r}, which is not a regular expression: {error}.") from error
    atoms = list(_atoms(pattern))
    for place, atom in enumerate(atoms):
        anchor = (atom == "^" and place > 0) or (atom == "$" and place < len(atoms) - 1)
        if anchor or "\0" in atom or (atom[0] in "\\[" and _REFUSED_ESCAPES.search(atom.replace("\\\\", ""))):
            raise ValueError(f"`{name}` is {pattern!r}; {atom!r} is not supported there.")
    # The library's dot is every character.
    return "".join(r"[^\n]" if atom == "." else atom for atom in atoms)


def _atoms(pattern: str) -> Iterator[str]:
    """The expression cut into escapes, classes and single characters."""
    return (match.group() for match in _ATOM.finditer(pattern))


def check_schema(schema: Any, name: str = "schema") -> None:
    """Raise a ValueError that names the first part of a JSON schema that could not be enforced."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise ValueError(f"`{name}` is {schema!r}; it must be an object or a boolean.")
    for key in ("$defs", "definitions"):
        for child, value in _mapping(schema, key, name).items():
            check_schema(value, f"{name}.{key}.{child}")
    keywords = schema.keys() - _ANNOTATIONS
    if not keywords:
        return
    for form, check in (("$ref", _check_reference), ("anyOf", _check_any_of), ("enum", _check_values)):
        if form in keywords:
            _check_known(keywords, {form, "type"} if form == "enum" else {form}, name)
            return check(schema, schema[form], name)
    if "const" in keywords:
        _check_known(keywords, {"const", "type"}, name)
        return _check_values(schema, [schema["const"]], name)
    _check_typed(schema, keywords, name)


def _check_typed(schema: Mapping, keywords: set[str], name: str) -> None:
    types = _types(schema, name)
    _check_known(keywords, {"type"}.union(*(_KEYWORDS[kind] for kind in types)), name)
    for exclusive in _EXCLUSIVE:
        if len(found := sorted(keywords & exclusive)) > 1:
            raise ValueError(f"`{name}` has {' and '.join(map(repr, found))}; only one of them can be enforced.")
    for key in ("minLength", "maxLength", "minItems", "maxItems"):
        if key in keywords and not (_TYPES["integer"](schema[key]) and schema[key] >= 0):
            raise ValueError(f"`{name}.{key}` is {schema[key]!r}; it must be an integer of at least 0.")
    for key in _NUMBER & keywords:
        if not _TYPES["number"](schema[key]):
            raise ValueError(f"`{name}.{key}` is {schema[key]!r}; it must be a number.")
    if "pattern" in keywords:
        _check_string_pattern(schema["pattern"], f"{name}.pattern")
    properties = _mapping(schema, "properties", name)
    if missing := [key for key in schema.get("required", ()) if key not in properties]:
        raise ValueError(f"`{name}.required` has {missing[0]!r}, which is not one of the properties.")
    children = {f"properties.{key}": value for key, value in properties.items()}
    children |= {key: schema[key] for key in ("items", "additionalProperties") if key in keywords}
    if not isinstance(prefix := schema.get("prefixItems", []), list):
        raise ValueError(f"`{name}.prefixItems` is {prefix!r}; it must be a list.")
    children |= {f"prefixItems.{place}": value for place, value in enumerate(prefix)}
    for key, value in children.items():
        check_schema(value, f"{name}.{key}")


def _types(schema: Mapping, name: str) -> list[str]:
    given = schema.get("type")
    types = [given] if isinstance(given, str) else given
    if not isinstance(types, list) or not types or not all(isinstance(kind, str) and kind in _TYPES for kind in types):
        raise ValueError(f"`{name}.type` is {given!r}; it must be one or several of {', '.join(_TYPES)}.")
    return types


def _check_known(keywords: set[str], known: set[str], name: str) -> None:
    if unknown := sorted(keywords - known):
        others = ", ".join(sorted(known))
        raise ValueError(f"`{name}` has {unknown[0]!r}, which cannot be enforced there; it may have {others}.")


def _check_reference(schema: Mapping, reference: Any, name: str) -> None:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        raise ValueError(f"`{name}.$ref` is {reference!r}; it must begin with '#/'.")


def _check_any_of(schema: Mapping, choices: Any, name: str) -> None:
    if not isinstance(choices, list) or not choices:
        raise ValueError(f"`{name}.anyOf` is {choices!r}; it must be a list of schemas.")
    for place, choice in enumerate(choices):
        check_schema(choice, f"{name}.anyOf.{place}")


def _check_values(schema: Mapping, values: Any, name: str) -> None:
    if not isinstance(values, list) or not values:
        raise ValueError(f"`{name}.enum` is {values!r}; it must be a list of values.")
    types = _types(schema, name) if "type" in schema else list(_TYPES)
    for value in values:
        if not any(_TYPES[kind](value) for kind in types):
            raise ValueError(f"`{name}` has the value {value!r}, which is not of type {schema['type']!r}.")


def _check_string_pattern(pattern: Any, name: str) -> None:
    """In a JSON string, these characters are written in another way than the expression has them."""
    if not isinstance(pattern, str):
        raise ValueError(f"`{name}` is {pattern!r}; it must be a regular expression.")
    checked_pattern(pattern, name)
    for atom in _atoms(pattern):
        # Alone, these are no expressions.
        if atom not in "^$|?*+(){}" and any(re.fullmatch(atom, c, re.ASCII) for c in _ESCAPED_IN_JSON):
            raise ValueError(f"`{name}` is {pattern!r}; {atom!r} may be a quote, a backslash or a control character.")


def _mapping(schema: Mapping, key: str, name: str) -> Mapping:
    if not isinstance(found := schema.get(key, {}), Mapping):
        raise ValueError(f"`{name}.{key}` is {found!r}; it must be an object.")
    return found
