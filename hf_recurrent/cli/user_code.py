"""`--import FILE`: run Python files of the user first, which register units, tasks and sources."""

import argparse
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from hf_recurrent.argument_checks import expand_home

IMPORT_HELP = "Run a Python file or module first that registers units, tasks or sources; may be repeated."


def add_import_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--import", dest="user_code", action="append", default=[], metavar="FILE", help=IMPORT_HELP)


def import_user_code(names: Sequence[str]) -> None:
    """Import files (`my_units.py`) and modules (`my_package.units`).

    The directory of a file is added to the end of `sys.path`, where processes that load data find it too.
    """
    for name in names:
        if name.endswith(".py") or os.sep in name or Path(name).is_file():
            _import(name, *_module_of_file(name))
        else:
            _import(name, name, None)


def import_flags(names: Sequence[str]) -> list[str]:
    """The command-line arguments that import the same files."""
    return [word for name in names for word in ("--import", name)]


def _module_of_file(name: str) -> tuple[str, Path]:
    """Name of the module of a file, which can be imported afterwards, and the path of the file."""
    path = expand_home(name)
    if not path.is_file():
        raise FileNotFoundError(f"`--import` is {name!r}; file not found.")
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ValueError(f"`--import` is {name!r}; it must be a Python file with a name such as my_units.py.")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
        importlib.invalidate_caches()
    module = sys.modules.get(path.stem)
    specification = module.__spec__ if module is not None else importlib.util.find_spec(path.stem)
    origin = None if specification is None else specification.origin
    if origin is None or not os.path.exists(origin) or not os.path.samefile(origin, path):
        raise ValueError(
            f"`--import` is {name!r}, but another module is named `{path.stem}` ({origin}); rename the file."
        )
    return path.stem, path


def _import(name: str, module: str, path: Path | None) -> None:
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever the file raises
        if isinstance(error, ModuleNotFoundError) and path is None and f"{module}.".startswith(f"{error.name}."):
            hint = f"; did you mean {name}.py?" if Path(f"{name}.py").is_file() else "."
            raise FileNotFoundError(f"`--import` is {name!r}; module not found{hint}") from error
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if path is not None and frame.filename == str(path)]
        where = f" in line {lines[-1]}" if lines else ""
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"`--import` is {name!r}; it fails{where}: {reason}") from error
