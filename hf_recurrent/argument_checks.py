"""Fields of dataclasses of arguments, ranges of numbers, paths and optional packages, for commands and settings."""

import copy
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import field
from numbers import Integral
from pathlib import Path
from typing import Any

# Of the integers of torch and NumPy.
_LIMIT = 2**63
# Of NumPy's global seed.
_SEED_LIMIT = 2**32
_SEEDS = ("seed", "seeds")
# More threads or processes than any machine can start.
_MOST_WORKERS = 4096
_WORKERS = ("threads", "processes", "dataloader_num_workers")


def argument(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    """A dataclass field of `HfArgumentParser`; `pretrain --help` reads default and help from the source."""
    metadata = {"help": help} | ({"choices": list(choices)} if choices else {})
    if isinstance(default, list):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_numbers(values: Mapping[str, object], prefix: str = "") -> None:
    """Raise a ValueError that names the first NaN, infinity, number outside 64 bits or impossible seed.

    Numbers and lists of numbers are checked. `prefix` begins names in messages: "--" for flags.
    """
    for name, value in values.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(number, int | float):
                continue
            # The comparisons are false for NaN too.
            if name in _SEEDS and not 0 <= number < _SEED_LIMIT:
                raise ValueError(f"`{prefix}{name}` is {number}; it must be from 0 to {_SEED_LIMIT - 1}.")
            if name == "threads" and number < 1:
                raise ValueError(f"`{prefix}{name}` is {number}; it must be at least 1.")
            if name in _WORKERS and number > _MOST_WORKERS:
                raise ValueError(f"`{prefix}{name}` is {number}; it must be at most {_MOST_WORKERS}.")
            if not -_LIMIT < number < _LIMIT:
                raise ValueError(f"`{prefix}{name}` is {number}; it must be a finite number below 2**63.")


def expand_home(path: str | os.PathLike) -> Path:
    """A path with `~` and `~user` replaced; an unknown user's stays, and is reported as a file that is missing.

    `Path.expanduser` raises a RuntimeError instead, which names neither the path nor its argument.
    """
    return Path(os.path.expanduser(path))


def import_optional(module: str, message: str) -> Any:
    """A module of an optional package, or an ImportError with a message that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(message) from error


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise a ValueError that names the argument unless its value is an integer (not a boolean) in the range."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"`{name}` is {value!r}; it must be an integer {bounds}.")


def is_number(value: object) -> bool:
    """True for integers and floats, not for booleans."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# Logits divided by less would be infinite, and their differences NaN.
LEAST_TEMPERATURE = 1e-6


def check_sampling(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, *, prefix: str = "", instead_of_zero: str = ""
) -> None:
    """Raise a ValueError that names the first argument of sampling that is out of range, after `prefix`.

    `instead_of_zero` is the argument that takes the most likely token, empty where a temperature of 0 does.
    """
    if not (LEAST_TEMPERATURE <= temperature < float("inf") or (temperature == 0 and not instead_of_zero)):
        allowed = f"{'' if instead_of_zero else '0 or '}at least {LEAST_TEMPERATURE}"
        allowed += f". For 0, use {instead_of_zero}" if instead_of_zero else ""
        raise ValueError(f"`{prefix}temperature` is {temperature}; it must be {allowed}.")
    if top_k < 0:
        raise ValueError(f"`{prefix}top_k` is {top_k}; it must be at least 0.")
    if not 0 < top_p <= 1:
        raise ValueError(f"`{prefix}top_p` is {top_p}; it must be more than 0 and at most 1.")


def check_probabilities(argument: str, probabilities: Sequence[float], num_sources: int) -> None:
    """Raise a ValueError that names `argument` unless these are shares of at least two sources."""
    given = " ".join(f"{value:g}" for value in probabilities)
    if num_sources < 2 or len(probabilities) != num_sources:
        raise ValueError(f"`{argument}` is {given}, for {num_sources} sources; it needs one for each of at least two.")
    if not all(0 < value < 1 for value in probabilities) or abs(sum(probabilities) - 1) > 1e-6:
        raise ValueError(f"`{argument}` is {given}; the numbers must be above 0, with the sum 1.")
