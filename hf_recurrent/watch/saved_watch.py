"""The saved state of a watch: judges and positions of all logs, and the sizes of the output files.

It is one JSON file with its own hash, replaced atomically: a watch starts without waiting for torch.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from hf_recurrent.checkpoints.atomic_files import atomic_file

FILE = "watch.json"
_FORMAT = 4


def save_watch(directory: Path, state: dict[str, Any]) -> None:
    """Replace the saved state.

    Raises:
        OSError: the disk is full, for example; the older state is unchanged.
    """
    content = json.dumps(state, separators=(",", ":"))
    head = json.dumps({"format": _FORMAT, "sha256": _hash(content)})
    final = directory / FILE
    try:
        with atomic_file(final) as partial:
            partial.write_text(f"{head}\n{content}\n", encoding="utf-8")
    except OSError as error:
        raise OSError(f"The state {os.fspath(final)!r} cannot be written: {error.strerror or error}.") from error


def read_watch(directory: Path) -> dict[str, Any] | None:
    """The saved state; None if there is none.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    path = directory / FILE
    try:
        head, _, content = path.read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The state {os.fspath(path)!r} cannot be read: {error}.") from error
    try:
        described = json.loads(head)
        if described["format"] != _FORMAT:
            raise ValueError(f"The state {os.fspath(path)!r} has another format than {_FORMAT}; use --restart.")
        if described["sha256"] != _hash(content.rstrip("\n")):
            raise ValueError(f"The state {os.fspath(path)!r} is damaged; use --restart.")
        return json.loads(content)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"The state {os.fspath(path)!r} is damaged; use --restart.") from error


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
