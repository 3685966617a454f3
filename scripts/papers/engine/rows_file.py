"""The finished rows, in a JSON file that grows by one row at a time."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

from papers.engine.experiment import Experiment


def rows_path(experiment: Experiment, size: str, output_dir: Path) -> Path:
    """The file of an experiment's rows."""
    return output_dir / f"{(experiment.rows_of or experiment.name).replace('-', '_')}_{size}.json"


def tuning_path(path: Path) -> Path:
    """The file of the comparisons of candidates of the rows in a file."""
    return path.with_name(f"{path.stem}_tuning.json")


def report_path(experiment: Experiment, size: str, output_dir: Path) -> Path:
    """The file of an experiment's table; its plot stands next to it."""
    return output_dir / f"{experiment.name.replace('-', '_')}_{size}.md"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run; none if there is no file.

    Raises:
        ValueError: the file is damaged.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("not a list of rows")
    except ValueError as error:
        raise ValueError(f"`{path}` is damaged ({error}); move it away to start over.") from error
    return rows


def find_row(rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any] | None:
    """The finished row with these settings, or None; settings that its candidates replace may have any value.

    A row of a study (`factors.py`) has its `level` in addition, and is found with it only.
    """
    chosen = {name for candidate in settings.get("candidates", ()) for name in candidate}
    given = {name: value for name, value in settings.items() if name not in chosen}
    level = settings.get("level")
    return next((row for row in rows if row.get("level") == level and given.items() <= row.items()), None)


def found_rows(rows: list[dict[str, Any]], wanted: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The finished rows with these settings, in the order of the settings."""
    return [row for settings in wanted if (row := find_row(rows, settings)) is not None]


def row_key(row: dict[str, Any]) -> str:
    """A hash of a row's settings."""
    return hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=8).hexdigest()


def add_row(row: dict[str, Any], path: Path, lock: Path) -> list[dict[str, Any]]:
    """Add a row to the rows of the file, which other processes may have changed, and return all."""
    with FileLock(lock):
        rows = [*read_rows(path), row]
        write_rows(rows, path)
    return rows


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write all rows, one a line; an interruption leaves the old file."""
    write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a text; an interruption leaves the old file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
