"""Spellings of flags: hyphens and underscores, other names for the same argument, and the one that was typed."""

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

# Other name → name. A command that has the first as a flag of its own keeps it.
ALIASES = {"max_bytes": "max_eval_bytes", "optimizer": "optim", "rule": "method"}
# Argument of a function → arguments of commands that set it, for errors that come from within.
_ARGUMENTS_OF = {
    "batch_size": ("num_streams",),
    "config_name": ("dataset_config",),
    "data": ("source",),
    "directory": ("output_dir",),
    "folder": ("output_dir",),
    "max_bytes": ("max_corpus_bytes",),
    "max_tokens": ("max_eval_bytes",),
    "optimizer": ("optim",),
    "pattern": ("regex",),
    "rule": ("method",),
    "runtime": ("format",),
    "schema": ("json_schema",),
    "source": ("corpus", "files"),
    "split": ("dataset_split",),
    "train_corpus": ("corpus",),
    "probabilities": ("corpus_probabilities",),
    "weights": ("quantize",),
}
_NAME = re.compile(r"`(\w+)`|(?<![\w-])--(\w+)(?![\w-])")
# argparse takes a word with a space for a value.
_FLAG = re.compile(r"--(\w[\w-]*)(?==|$)")


def normalize(words: Sequence[str], known: Iterable[str] | None) -> tuple[list[str], dict[str, str]]:
    """Words of a command line with the parser's spelling of every flag, and {name without dashes: flag as typed}.

    `known` are the flags of the parser, such as "--block_size"; None takes every word with two dashes for one.
    """
    known, result, typed = None if known is None else set(known), [], {}
    for index, word in enumerate(words):
        if word == "--":
            return [*result, *words[index:]], typed
        match = _FLAG.match(word)
        if match:
            name = match[1].replace("-", "_")
            other = ALIASES.get(name)
            if other and (known is None or (f"--{name}" not in known and f"--{other}" in known)):
                name = other
            if known is None or any(flag.startswith(f"--{name}") for flag in known):
                typed[name] = match[0]
                word = f"--{name}{word[match.end() :]}"
        result.append(word)
    return result, typed


def name_typed(message: str, typed: dict[str, str]) -> str:
    """The message with the arguments that were typed, in place of arguments of functions and other spellings.

    `typed` is the result of [`normalize`] with names of positional arguments, such as "model": "MODEL".
    """

    def replace(match: re.Match) -> str:
        inner, flag = match.groups()
        if flag is not None:
            return typed.get(flag, match[0])
        found = [typed[name] for name in (*_ARGUMENTS_OF.get(inner, ()), inner) if name in typed]
        return f"`{found[0]}`" if found else match[0]

    message = re.sub(r"argument (--[\w-]+)(/--[\w-]+)+:", r"argument \1:", message)
    return _NAME.sub(replace, message).replace("pass `binary=True`", "add `--binary`")


@contextmanager
def named(**arguments: str) -> Iterator[None]:
    """Inside the block, errors name these in place of functions' arguments: `named(source="--held_out")`."""
    try:
        yield
    except (OSError, ValueError) as error:
        message = name_typed(str(error), arguments)
        if message == str(error) or len(error.args) != 1:  # others have fields, such as the number of an OSError
            raise
        raise type(error)(message) from error


def check_recognized(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Raise a ValueError for the first word that is not a flag of a parser."""
    known = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    for word in normalize(words, known)[0]:
        if word == "--":
            return
        match = _FLAG.match(word)
        if match and " " not in word and not any(flag.startswith(match[0]) for flag in known):
            raise unrecognized(match[0], known)


def unrecognized(word: str, flags: Iterable[str]) -> ValueError:
    """The error for an unrecognized argument, with the nearest flag."""
    flags = {flag.replace("-", "_").replace("__", "--", 1) for flag in flags}
    hint = did_you_mean(word.replace("-", "_").replace("__", "--", 1), sorted(flags))
    return ValueError(f"unrecognized arguments: {word}{hint}")


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "; --help lists all arguments.") -> str:
    """The end of a sentence about an unknown word: the nearest known word, or `otherwise`."""
    nearest = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {nearest[0]}?" if nearest else otherwise
