"""Parsing and checks of arguments: all commands report bad input in the same words."""

import argparse
import dataclasses
import json
import os
import re
import reprlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from hf_recurrent.argument_checks import check_numbers
from hf_recurrent.cli.flags import check_recognized, did_you_mean, name_typed, normalize, unrecognized
from hf_recurrent.cli.standard_output import checked_output, print_any_text
from hf_recurrent.cli.user_code import add_import_argument, import_user_code

_Result = TypeVar("_Result")
# Characters of an error message; longer ones, of long arguments, are cut in the middle.
_LONGEST_MESSAGE = 1200


class OneSentenceErrors:
    """Mixin of argument parsers: bad input ends with one sentence and status 2, without the usage; with `--import`."""

    typed: dict[str, str] = {}  # noqa: RUF012 (replaced, never changed)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if "\n" in f"{options.get('description')}{options.get('epilog')}":  # laid out by hand
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*arguments, **options)
        add_import_argument(self)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Accept every spelling of a flag; refuse `--flag=--`, which argparse reads as a flag with an empty list."""
        args, typed = normalize(sys.argv[1:] if args is None else args, self._option_string_actions)
        positional = {one.dest: one.metavar or one.dest for one in self._actions if not one.option_strings}
        self.typed = positional | typed  # a flag of the same name takes precedence
        if found := next((word for word in args if re.fullmatch(r"--?\w[\w-]*=--", word)), None):
            self.error(f"argument {found.partition('=')[0]}: expected a value, not '--'")
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help; argparse ignores errors of the output."""
        if message and file is sys.stdout:
            print(message, end="", flush=True)
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(name_typed(message, self.typed))}\n")


class CommandParser(OneSentenceErrors, argparse.ArgumentParser):
    """The parser of a command whose arguments are not dataclasses."""


def one_line(message: str) -> str:
    """An error message without line breaks, cut in the middle if it is very long."""
    message = " ".join(message.split())
    if len(message) <= _LONGEST_MESSAGE:
        return message
    half = _LONGEST_MESSAGE // 2
    return f"{message[:half]} [...] {message[-half:]}"


def run_command(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    action: Callable[..., _Result],
    *,
    passes_on: bool = False,
) -> _Result:
    """The result of `action` on the parsed arguments; on bad input, exit with one sentence and status 2.

    With `passes_on`, words that the parser does not know are not refused, and are the second argument of `action`.
    """
    print_any_text()
    words = sys.argv[1:] if argv is None else argv
    try:
        with checked_output(parser.error):
            if not passes_on and not {"-h", "--help"}.intersection(words):
                check_recognized(parser, words)
            arguments, remaining = parser.parse_known_args(words)
            if remaining and not passes_on:
                raise unrecognized(remaining[0], parser._option_string_actions)
            parser.typed = normalize(remaining, None)[1] | parser.typed  # of the parser that reads the rest
            check_numbers(vars(arguments), "--")
            import_user_code(arguments.user_code)
            return action(arguments, remaining) if passes_on else action(arguments)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    except (MemoryError, RuntimeError) as error:
        parser.error(explain_memory(error))


JSON_HELP = "print the results as JSON"


def add_json_argument(parser: Any) -> None:
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def command(
    build_parser: Callable[[], argparse.ArgumentParser], action: Callable[[argparse.Namespace], object]
) -> Callable[[Sequence[str] | None], None]:
    """The `main` of a command that calls `action` with its parsed arguments, by default from the command line."""

    def main(argv: Sequence[str] | None = None) -> None:
        run_command(build_parser(), argv, action)

    return main


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors with which Python, NumPy and torch report a failed allocation."""
    # On the CPU, torch has no type of its own for it.
    return isinstance(error, MemoryError) or bool(re.search("out of memory|allocate memory|alloc_cpu", str(error)))


def explain_memory(error: BaseException) -> str:
    """The sentence about a failed allocation; any other error is raised again."""
    if not is_out_of_memory(error):
        raise error
    return f"not enough memory; use smaller sizes ({error})"


def dataclass_of(kind: Callable[..., _Result], arguments: argparse.Namespace) -> _Result:
    """A dataclass whose fields are arguments of the same names."""
    return kind(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(kind)})


def parse_pairs(flag: str, pairs: Sequence[str]) -> dict[str, Any]:
    """["hidden_size=64", "a=true", "b=1e-3"] → {"hidden_size": 64, "a": True, "b": 0.001}; values are JSON or YAML."""
    result = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"`{flag}` has {reprlib.repr(pair)}; it must be NAME=VALUE.")
        place = f"The value of `{key}` in `{flag}`"
        try:
            value = json.loads(text)  # YAML reads 1e-3 as text
        except (ValueError, RecursionError):
            value = parse_yaml(text, place)
        result[key] = value
    check_numbers(result)
    return result


def parse_yaml(text: str | bytes, place: str) -> Any:
    """The value of a YAML text without tags; raise a ValueError that names `place` if it is malformed."""
    try:
        return yaml.safe_load(text)
    except Exception as error:  # for malformed values, PyYAML raises types of its own, KeyError and IndexError
        raise ValueError(f"{place} is not valid YAML: {one_line(str(error)) or type(error).__name__}.") from error


def check_at_least(least: int, arguments: object, *names: str) -> None:
    """Raise a ValueError that names the first argument below `least`; None is one that was not given."""
    for name in names:
        if (value := getattr(arguments, name)) is not None and value < least:
            raise ValueError(f"`--{name}` is {value}; it must be at least {least}.")


def check_file(name: str, path: Path | None) -> None:
    """Raise a FileNotFoundError if the file of an argument does not exist, a ValueError if it is not a regular one."""
    if path is not None and not path.is_file():
        if path.exists():
            raise ValueError(f"`{name}` is {str(path)!r}; it must be a regular file.")
        raise FileNotFoundError(f"`{name}` is {str(path)!r}; file not found.")


def read_text(name: str, path: Path) -> str:
    """The text of the file of an argument; raise a ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{name}` is {str(path)!r}, which is not UTF-8 text.") from error


def check_parent(name: str, path: Path | None) -> None:
    """Raise a FileNotFoundError if the directory of a file to be written does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"`{name}` is {str(path)!r}; directory {str(path.parent)!r} not found.")


def check_output(name: str, path: Path | None) -> None:
    """As [`check_parent`]; raise an IsADirectoryError if the file is a directory."""
    check_parent(name, path)
    if path is not None and path.is_dir():
        raise IsADirectoryError(f"`{name}` is {str(path)!r}; it must be a file, not a directory.")


def check_model_name(argument: str, name: str, others: Iterable[str] = ()) -> None:
    """Raise a FileNotFoundError if a name can only be a directory, and that is missing or not a checkpoint.

    A file is a ValueError. A name with one slash may be owner/name on the Hub, unless its first part is a directory
    here: downloads of a missing repository are retried for a minute. `others` are further names to suggest.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        raise ValueError(f"`{argument}` is {name!r}; it must be a directory, or owner/name on the Hub.")
    if path.is_dir() or name.startswith((".", "/", "~")) or name.count("/") != 1 or path.parent.is_dir():
        check_checkpoint(argument, path, others)


def check_checkpoint(name: str, path: Path, others: Iterable[str] = ()) -> None:
    """Raise a FileNotFoundError if a directory is not a checkpoint; suggest one with a similar name."""
    if not path.is_dir():
        siblings = []
        if path.parent.is_dir() and os.access(path.parent, os.R_OK):
            siblings = [str(path.parent / found.name) for found in path.parent.iterdir() if found.is_dir()]
        hint = did_you_mean(str(path), [*siblings, *others], otherwise=".")
        raise FileNotFoundError(f"`{name}` is {str(path)!r}; directory not found{hint}")
    if not any((path / config).is_file() for config in ("config.json", "adapter_config.json")):
        raise FileNotFoundError(f"`{name}` is {str(path)!r}; it must be a checkpoint, but it has no `config.json`.")
