"""Paths of this machine in files that are about to be published: they name users and projects."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_recurrent.checkpoints.privacy import find_local_path
from hf_recurrent.checkpoints.provenance_files import PROVENANCE_FILE

# Files whose values are names and numbers. The others are vocabularies, weights and our own code.
_CONFIGURATIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "adapter_config.json",
    PROVENANCE_FILE,
)
_CARD = "README.md"


def check_no_local_paths(directory: str | os.PathLike) -> None:
    """Raise a ValueError if a configuration or the card in `directory` has a path of this machine."""
    for name in _CONFIGURATIONS:
        path = Path(directory, name)
        for place, text in _texts(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ():
            if found := find_local_path(text):
                raise ValueError(
                    f"`{name}` has the local path {found!r} in `{place}`, which would be published; remove it, or "
                    "give a name on the Hub."
                )
    card = Path(directory, _CARD)
    if card.is_file() and (found := find_local_path(card.read_text(encoding="utf-8"))):
        raise ValueError(f"`{_CARD}` has the local path {found!r}, which would be published; remove it.")


def _texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """All texts in a JSON value, each with the key that leads to it."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, place)
