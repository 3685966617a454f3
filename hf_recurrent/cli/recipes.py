"""Recipes: YAML files of arguments, read as if each were a flag of the command line."""

import os
import types
import typing
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_recurrent.cli.parsing import parse_yaml


def recipe_names() -> list[str]:
    folder = files("hf_recurrent").joinpath("recipes")
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """The arguments of a recipe, by its name or from a YAML file; `none` is empty."""
    if name == "none":
        return {}
    if name in recipe_names():
        data = files("hf_recurrent").joinpath("recipes", f"{name}.yaml").read_bytes()
    elif os.path.isfile(name):
        data = Path(name).read_bytes()
    else:
        raise FileNotFoundError(
            f"`--recipe` is {name!r}; it must be a YAML file, none, or one of {', '.join(recipe_names())}."
        )
    recipe = parse_yaml(data, f"The recipe {name!r}") or {}
    if not isinstance(recipe, dict) or not all(isinstance(key, str) for key in recipe):
        raise ValueError(f"The recipe {name!r} is a {type(recipe).__name__}; it must map arguments to values.")
    return recipe


def recipe_flags(
    name: str, recipe: Mapping[str, Any], types_of: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Flags for the values of a recipe that a flag can express, and the other values, as defaults."""
    flags, defaults = [], {}
    for key, value in recipe.items():
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # YAML has 2.0e+3 where an integer is meant
        if isinstance(value, str | int | float):
            flags.append(f"--{key}={value}")
            continue
        kind = type(value)
        if kind not in _alternatives(types_of.get(key, str)):
            kind_name = "null" if value is None else f"a {kind.__name__}"
            raise ValueError(f"`{key}` in the recipe {name!r} is {kind_name}; it must be a single value.")
        defaults[key] = list(map(str, value)) if isinstance(value, list) else value
    return flags, defaults


def _alternatives(annotation: Any) -> list[Any]:
    """The classes that an annotation allows: of `list[str] | None`, list and NoneType."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in _alternatives(part)]
    return [typing.get_origin(annotation) or annotation]
