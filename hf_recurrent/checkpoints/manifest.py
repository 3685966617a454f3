"""The manifest of a checkpoint: size and SHA-256 of every file, so that damage is noticed before anything is used.

Checksums detect accidents, such as a flipped bit or a file of another checkpoint. They are not signatures: who can
write the files can write the manifest.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from hf_recurrent.checkpoints.files import read_json, write_json

MANIFEST_FILE = "manifest.json"
_CHECKSUM = "checksum"  # of the manifest itself


def write_manifest(directory: str | os.PathLike, **fields: Any) -> None:
    """Write the manifest of all files below `directory`, and `fields`; call it last, before it is published."""
    root = Path(directory)
    paths = sorted(path for path in root.rglob("*") if path.is_file() and path != root / MANIFEST_FILE)
    files = {
        path.relative_to(root).as_posix(): {"size": path.stat().st_size, "sha256": _hash_file(path)} for path in paths
    }
    content = {**fields, "files": files}
    write_json({**content, _CHECKSUM: _hash_json(content)}, root / MANIFEST_FILE)


def read_manifest(directory: str | os.PathLike) -> dict[str, Any]:
    """The manifest of a checkpoint; raise a ValueError if it is missing or damaged."""
    path = Path(directory, MANIFEST_FILE)
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(files := content.get("files"), dict | list):
        raise ValueError(f"The checkpoint file `{path}` is damaged: it has no list of files.")
    if isinstance(files, list):  # of an earlier version, without checksums
        content["files"] = {str(name): {} for name in files}
    elif content.pop(_CHECKSUM, None) != _hash_json(content):
        raise ValueError(f"The checkpoint file `{path}` is damaged: its content differs from its checksum.")
    return content


def check_manifest(directory: str | os.PathLike, index: int = 0, count: int = 1) -> dict[str, Any]:
    """Compare every `count`-th file, from `index` on, with the manifest of a checkpoint, and return the manifest.

    Raises:
        ValueError: the manifest or a file is missing or damaged.
    """
    manifest = read_manifest(directory)
    for name, expected in sorted(manifest["files"].items())[index::count]:
        if damage := _damage(Path(directory, name), expected):
            raise ValueError(f"The checkpoint `{os.fspath(directory)}` is damaged: `{name}` {damage}.")
    return manifest


def _damage(path: Path, expected: dict[str, Any]) -> str | None:
    """The difference of a file from its entry in the manifest, in words."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            return "is not a file"
        if size != expected.get("size", size):
            return f"has {size:,} bytes instead of {expected['size']:,}"
        if "sha256" in expected and _hash_file(path) != expected["sha256"]:
            return "differs from its checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_json(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
