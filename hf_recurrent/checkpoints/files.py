"""Checkpoint files: reading them executes no code, and writing them is atomic.

A nested structure of numbers, strings, lists, tuples, dictionaries and tensors is stored as two files: its tensors
in NAME.safetensors, the rest in NAME.json. Directories are written under a temporary name, then renamed.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from hf_recurrent.checkpoints.atomic_files import atomic_file, sync
from hf_recurrent.checkpoints.tensor_files import open_tensors, write_tensors

# The Trainer does not upload files that begin with an underscore.
STAGING_PREFIX = "_staging-"
REPLACED_PREFIX = "_replaced-"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# Keys that mark types without a JSON equivalent; optimizers and random states have no such keys.
_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def save_tree(tree: Any, directory: str | os.PathLike, name: str, *, writes: bool = True) -> None:
    """Write `tree` as NAME.json and NAME.safetensors, tensor by tensor; a TypeError for other types.

    Of sharded tensors, all processes give their parts, also those that do not write.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = _encode(tree, name, tensors)
    write_tensors(tensors, os.path.join(directory, f"{name}.safetensors") if writes else None)
    if writes:
        write_json(structure, os.path.join(directory, f"{name}.json"))


def load_tree(
    directory: str | os.PathLike, name: str, place: Callable[[str, torch.Tensor], torch.Tensor] | None = None
) -> Any:
    """Read the files of [`save_tree`], tensor by tensor; raise a ValueError if one is missing or damaged.

    `place` maps the path of a tensor, such as "optimizer.state.0.exp_avg", and the tensor to its replacement.
    """
    structure = read_json(os.path.join(directory, f"{name}.json"))
    with reading_checkpoint(os.path.join(directory, f"{name}.safetensors")) as path, open_tensors(path) as file:

        def read(key: str) -> torch.Tensor:
            # Cloned, because a new tensor is aligned in memory: alignment decides how sums are rounded.
            tensor = file.get_tensor(key).clone()
            return tensor if place is None else place(key, tensor)

        return _decode(structure, read)


@contextmanager
def reading_checkpoint(path: str | os.PathLike) -> Iterator[str]:
    """Inside the block, any error that the content of a checkpoint can cause becomes one ValueError that names it."""
    try:
        yield os.fspath(path)
    except ValueError:
        raise
    except (
        ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError
    ) as error:  # fmt: skip
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"`{os.fspath(path)}` is missing or damaged: {reason[0].rstrip('.')}.") from error


def pack_tensors(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """The content of a safetensors file."""
    # Copies, because safetensors rejects tensors that share memory.
    return save(
        {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, metadata
    )


def unpack_tensors(data: bytes, name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of [`pack_tensors`], not checked yet; `name` is the file or argument in a ValueError."""
    try:
        tensors = load(data)
        # The library reads metadata from files only.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return tensors, header.get("__metadata__") or {}
    except (SafetensorError, KeyError, AttributeError) as error:  # the last two for types unknown to torch
        raise ValueError(f"`{name}` is damaged or not a saved state: {error}.") from error


def write_json(value: Any, path: str | os.PathLike) -> None:
    """Write a JSON file atomically."""
    with atomic_file(path) as partial:
        partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike) -> Any:
    """The content of a JSON file; raise a ValueError if it is missing or damaged."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"The checkpoint file `{os.fspath(path)}` is missing or damaged: {error}.") from error


@contextmanager
def writing_checkpoint(final: str | os.PathLike) -> Iterator[None]:
    """Inside the block, an error of the disk becomes one OSError that names `final`; its staging directory is removed.

    Checkpoints that were complete before stay as they are.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging_path(final), ignore_errors=True)  # may be what fills the disk
        raise OSError(
            f"The checkpoint {os.fspath(final)!r} cannot be written: {getattr(error, 'strerror', None) or error}. "
            "Earlier checkpoints are unchanged."
        ) from error


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[path] = value
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


def _decode(value: Any, read: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return read(value[_TENSOR])
    if _TUPLE in value:
        return tuple(_decode(item, read) for item in value[_TUPLE])
    if _PAIRS in value:
        return {key: _decode(item, read) for key, item in value[_PAIRS]}
    return {key: _decode(item, read) for key, item in value.items()}


def staging_path(final: str | os.PathLike) -> Path:
    """The directory next to `final` in which it is written until it is complete."""
    return Path(final).with_name(STAGING_PREFIX + Path(final).name)


def new_staging_directory(final: str | os.PathLike) -> Path:
    """Make [`staging_path`] an empty directory, for [`publish_directory`] or [`publish_files`]."""
    staging = staging_path(final)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    return staging


def publish_directory(staging: str | os.PathLike, final: str | os.PathLike) -> None:
    """Rename a complete directory to `final`; a directory that it replaces is deleted last."""
    staging, final = Path(staging), Path(final)
    for path in (*filter(Path.is_file, staging.rglob("*")), staging):
        sync(path)
    replaced = final.with_name(REPLACED_PREFIX + final.name)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(staging, final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def publish_files(staging: str | os.PathLike, final: str | os.PathLike) -> None:
    """Move complete files into the directory `final`, each replacing a file of the same name atomically."""
    os.makedirs(final, exist_ok=True)
    for path in sorted(Path(staging).iterdir()):
        sync(path)
        os.replace(path, Path(final, path.name))
    os.rmdir(staging)


def checkpoint_number(path: str | os.PathLike) -> int | None:
    """The number in the name of a checkpoint; None for other names."""
    match = _CHECKPOINT.fullmatch(Path(path).name.removeprefix(REPLACED_PREFIX))
    return int(match[1]) if match else None


def list_checkpoints(output_dir: str | os.PathLike) -> list[str]:
    """The checkpoints in `output_dir`, complete or damaged, by their number.

    A checkpoint that [`publish_directory`] was replacing when it was interrupted counts under its temporary name.
    """
    # Sorted, a temporary name comes first, and the final one takes its place.
    paths = sorted(path for path in Path(output_dir).glob("*checkpoint-*") if path.is_dir())
    found = {checkpoint_number(path): os.fspath(path) for path in paths}
    return [found[number] for number in sorted(found.keys() - {None})]


def remove_staging(output_dir: str | os.PathLike) -> None:
    """Delete temporary directories that a killed process left."""
    for path in Path(output_dir).glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
