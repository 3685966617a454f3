"""Checkpoint files that execute nothing when they are read, and are whole or not there.

A nested structure of numbers, strings, lists, tuples, dictionaries and tensors is stored as two files: its tensors
in NAME.safetensors, the rest in NAME.json. A directory is written beside its final name and renamed when complete.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

# Both begin with an underscore: the Trainer does not upload such files.
STAGING_PREFIX = "_staging-"
REPLACED_PREFIX = "_replaced-"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# Marks what JSON cannot say by itself: no key of an optimizer or a random state looks like this.
_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def save_tree(tree: Any, directory: str | os.PathLike, name: str) -> None:
    """Write `tree` as NAME.json and NAME.safetensors; a value of another kind is a TypeError."""
    tensors: dict[str, torch.Tensor] = {}
    structure = _encode(tree, name, tensors)
    save_file(tensors, os.path.join(directory, f"{name}.safetensors"))
    write_json(structure, os.path.join(directory, f"{name}.json"))


def load_tree(directory: str | os.PathLike, name: str) -> Any:
    """Read what [`save_tree`] wrote, tensors on the CPU.

    Raises:
        ValueError: a file is missing or damaged.
    """
    structure = read_json(os.path.join(directory, f"{name}.json"))
    path = os.path.join(directory, f"{name}.safetensors")
    try:
        return _decode(structure, load_file(path))
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"The checkpoint file `{path}` is missing or damaged: {error}.") from error


def write_json(value: Any, path: str | os.PathLike) -> None:
    Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike) -> Any:
    """A JSON file's content; ValueError where it is missing or damaged."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"The checkpoint file `{os.fspath(path)}` is missing or damaged: {error}.") from error


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        # A copy: tensors that share memory are refused by safetensors, and views would store their whole base.
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: path}
    if isinstance(value, dict):
        pairs = [(key, _encode(item, f"{path}.{key}", tensors)) for key, item in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else {_PAIRS: pairs}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}.{number}", tensors) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"A checkpoint holds numbers, strings and tensors; `{path}` is a {type(value).__name__}.")


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        # In memory of its own: where in a cache line a tensor begins decides how sums are rounded.
        return tensors[value[_TENSOR]].clone()
    if _TUPLE in value:
        return tuple(_decode(item, tensors) for item in value[_TUPLE])
    if _PAIRS in value:
        return {key: _decode(item, tensors) for key, item in value[_PAIRS]}
    return {key: _decode(item, tensors) for key, item in value.items()}


def publish_directory(staging: str | os.PathLike, final: str | os.PathLike) -> None:
    """Give a complete directory its final name; whatever had it before is removed only afterwards."""
    staging, final = Path(staging), Path(final)
    for path in staging.rglob("*"):
        if path.is_file():
            _sync(path)
    _sync(staging)
    replaced = final.with_name(REPLACED_PREFIX + final.name)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(staging, final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def publish_files(staging: str | os.PathLike, final: str | os.PathLike) -> None:
    """Move complete files into a directory that may hold others, each replacing its namesake at once."""
    os.makedirs(final, exist_ok=True)
    for name in sorted(os.listdir(staging)):
        _sync(Path(staging, name))
        os.replace(os.path.join(staging, name), os.path.join(final, name))
    os.rmdir(staging)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_last_checkpoint(output_dir: str | os.PathLike, is_complete: Callable[[str], bool]) -> str | None:
    """The complete checkpoint of the most steps in `output_dir`, or None.

    A checkpoint whose replacement was cut off between the two renames of [`publish_directory`] counts under the name
    that it was moved to.
    """
    if not os.path.isdir(output_dir):
        return None
    found = []
    for name in os.listdir(output_dir):
        match = _CHECKPOINT.fullmatch(name.removeprefix(REPLACED_PREFIX))
        path = os.path.join(output_dir, name)
        if match and is_complete(path):
            found.append((int(match[1]), not name.startswith(REPLACED_PREFIX), path))
    return max(found)[2] if found else None


def remove_staging(output_dir: str | os.PathLike) -> None:
    """Delete what a killed process left half written."""
    for path in Path(output_dir).glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
