"""Parsing and checks of arguments: all commands report bad input in the same words."""

import argparse
import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

_Result = TypeVar("_Result")


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    action: Callable[[argparse.Namespace], _Result],
) -> _Result:
    """The result of `action` on the parsed arguments; on bad input, exit with one sentence and status 2."""
    arguments, unrecognized = parser.parse_known_args(argv)
    try:
        check_recognized(parser, unrecognized)
        return action(arguments)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


def check_recognized(parser: argparse.ArgumentParser, unrecognized: Sequence[str]) -> None:
    """Raise a ValueError that names the first unrecognized argument and the nearest flag."""
    if unrecognized:
        flags = re.findall(r"--\w+", parser.format_help())
        raise ValueError(f"unrecognized argument {unrecognized[0]}{did_you_mean(unrecognized[0], flags)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the nearest known word, if there is one."""
    nearest = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {nearest[0]}?" if nearest else "; --help lists all arguments."


def parse_pairs(flag: str, pairs: Sequence[str]) -> dict[str, Any]:
    """["hidden_size=64", "a=true", "b=1e-3"] → {"hidden_size": 64, "a": True, "b": 0.001}; values are JSON or YAML."""
    result = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"`{flag}` has {pair!r}; it must be NAME=VALUE.")
        try:
            result[key] = json.loads(text)  # YAML reads 1e-3 as text
        except ValueError:
            result[key] = yaml.safe_load(text)
    return result


def check_at_least(least: int, arguments: object, *names: str) -> None:
    """Raise a ValueError that names the first argument below `least`."""
    for name in names:
        if getattr(arguments, name) < least:
            raise ValueError(f"`--{name}` is {getattr(arguments, name)}; it must be at least {least}.")


def check_file(name: str, path: Path | None) -> None:
    """Raise a FileNotFoundError if the file of an argument does not exist."""
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"`{name}` is {str(path)!r}; file not found.")


def check_parent(name: str, path: Path | None) -> None:
    """Raise a FileNotFoundError if the directory of a file to be written does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"`{name}` is {str(path)!r}; directory {str(path.parent)!r} not found.")


def check_checkpoint(name: str, path: Path) -> None:
    """Raise a FileNotFoundError if a directory is not a checkpoint."""
    if not path.is_dir():
        raise FileNotFoundError(f"`{name}` is {str(path)!r}; directory not found.")
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"`{name}` is {str(path)!r}; it must be a checkpoint, but it has no `config.json`.")
