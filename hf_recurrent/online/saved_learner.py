"""The files of a saved learner, checked before anything of them is used.

Checksums detect accidents. Every value is checked too, because somebody else may have written the files.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent.checkpoints.files import load_tree, read_json, reading_checkpoint
from hf_recurrent.checkpoints.manifest import MANIFEST_FILE, check_manifest
from hf_recurrent.checkpoints.weights import check_weights
from hf_recurrent.hub.loading import load_model, load_tokenizer
from hf_recurrent.online.settings import LearnerSettings

LEARNER_FILES = "learner"
# 2: with a manifest. Version 1 had none, and no number.
FORMAT = 2
_LARGEST = 2**63 - 1


def is_saved_learner(directory: str | os.PathLike) -> bool:
    """True if the directory has the files of [`OnlineLearner.save`], damaged or not."""
    return all(os.path.isfile(_file(directory, kind)) for kind in ("json", "safetensors"))


def check_files(directory: str | os.PathLike) -> None:
    """Raise a ValueError that names the first file of a saved learner that is missing or damaged."""
    manifest = os.path.join(directory, MANIFEST_FILE)
    with reading_checkpoint(directory):
        has_manifest = os.path.lexists(manifest)
        if has_manifest:
            check_manifest(directory)
        if not is_saved_learner(directory):
            raise ValueError(f"`directory` is {os.fspath(directory)!r}; it must be a saved learner.")
        content = read_json(_file(directory, "json"))
        if not has_manifest and isinstance(content, dict) and "format" in content:
            raise ValueError(f"The checkpoint file `{manifest}` is missing.")


def read_saved_learner(directory: str | os.PathLike) -> dict[str, Any]:
    """The values that [`OnlineLearner.save`] wrote, their settings as [`LearnerSettings`].

    Raises:
        ValueError: a file is missing or damaged, or a value cannot be that of a learner.
    """
    check_files(directory)
    with reading_checkpoint(_file(directory, "json")) as path:
        _check_references(read_json(path), _file(directory, "safetensors"))
        tree = load_tree(directory, LEARNER_FILES)
        try:
            return _checked(tree)
        except ValueError as error:
            raise ValueError(f"The checkpoint file `{path}` is damaged: {error}") from error


def load_saved_model(directory: str | os.PathLike, *, trust_remote_code: bool = False) -> tuple[PreTrainedModel, Any]:
    """The model of a saved learner, and its tokenizer or None.

    Raises:
        ValueError: they cannot be loaded, or a weight is missing, unknown or of another shape.
    """
    options = {"argument": "directory", "trust_remote_code": trust_remote_code}
    model = load_model(AutoModelForCausalLM, directory, dtype="auto", **options)
    check_weights(model, directory)
    has_tokenizer = os.path.isfile(os.path.join(directory, "tokenizer_config.json"))
    return model, load_tokenizer(directory, **options) if has_tokenizer else None


def check_tensors(part: str, stored: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError that names the first stored tensor without one of the same shape and kind of numbers."""
    for name, tensor in stored.items():
        if name not in own:
            raise ValueError(f"its `{part}` has `{name}`, which the model does not have.")
        wanted = own[name]
        same_kind = (tensor.is_floating_point(), tensor.is_complex()) == (
            wanted.is_floating_point(),
            wanted.is_complex(),
        )
        if tensor.shape != wanted.shape or not same_kind:
            raise ValueError(
                f"its `{part}` has `{name}` with shape {tuple(tensor.shape)} and type {tensor.dtype}, but the model "
                f"needs {tuple(wanted.shape)} and {wanted.dtype}."
            )


def _file(directory: str | os.PathLike, kind: str) -> str:
    return os.path.join(directory, f"{LEARNER_FILES}.{kind}")


def _check_references(content: Any, path: str) -> None:
    """Raise a ValueError unless every tensor of the file belongs to exactly one place of learner.json."""
    found, parts = [], [content]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if "__tensor__" in part:
                found.append(str(part["__tensor__"]))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    with reading_checkpoint(path), safe_open(path, framework="pt") as file:
        stored = sorted(file.keys())
    if sorted(found) != stored:
        odd = sorted({*found} ^ {*stored}) or sorted(name for name in {*found} if found.count(name) > 1)
        raise ValueError(f"The checkpoint file `{path}` does not belong to learner.json: see the tensor `{odd[0]}`.")


def _checked(tree: Any) -> dict[str, Any]:
    """The same values, or a ValueError that names the first one that no learner saves."""
    if not isinstance(tree, dict):
        raise ValueError(f"it holds a JSON {type(tree).__name__} instead of an object.")
    names = {
        "settings", "bytes_read", "updates", "metadata", "meter", "last", "waiting", "state", "carried", "summed",
        "gradients", "optimizer",
    }  # fmt: skip
    if wrong := sorted(map(str, names ^ (tree.keys() - {"format"}))):
        raise ValueError(f"`{wrong[0]}` is {'missing' if wrong[0] in names else 'unknown'}.")
    if (version := tree.get("format")) not in (None, FORMAT):
        raise ValueError(f"`format` is {version!r:.40}; it must be {FORMAT} at most.")
    settings = _settings(tree["settings"])
    read = _integer("bytes_read", tree["bytes_read"], _LARGEST)
    _integer("updates", tree["updates"], read)
    for name in ("metadata", "meter", "state", "carried", "gradients"):
        if not isinstance(tree[name], dict):
            raise ValueError(f"`{name}` is {tree[name]!r:.40}; it must be an object.")
    for name in ("state", "carried", "gradients"):
        for key, value in tree[name].items():
            if not isinstance(key, str) or not isinstance(value, torch.Tensor):
                raise ValueError(f"`{name}` has {key!r:.40}, which is not a tensor.")
    _check_meter(tree["meter"], settings.window, read)
    if tree["last"] is not None:
        _check_tokens("last", tree["last"], 1)
    if not isinstance(tree["waiting"], list) or len(tree["waiting"]) > read:
        raise ValueError(f"`waiting` is {tree['waiting']!r:.40}; it must be a list of at most {read} transitions.")
    for item in tree["waiting"]:
        _check_tokens("waiting", item, 2)
    if not isinstance(tree["summed"], tuple) or len(tree["summed"]) != 2:
        raise ValueError(f"`summed` is {tree['summed']!r:.40}; it must be two numbers.")
    blocks = _integer("summed", tree["summed"][0], settings.update_every - 1)
    if _integer("summed", tree["summed"][1], _LARGEST) != blocks * settings.stride:
        raise ValueError(f"`summed` is {tree['summed']!r:.40}, but a block has {settings.stride} bytes.")
    if not isinstance(tree["optimizer"], dict if settings.learn else None.__class__):
        raise ValueError(f"`optimizer` is {tree['optimizer']!r:.40}, but `learn` is {settings.learn}.")
    return tree | {"settings": settings}


def _settings(values: Any) -> LearnerSettings:
    if not isinstance(values, dict):
        raise ValueError(f"`settings` is {values!r:.40}; it must be an object.")
    kinds = {field.name: type(field.default) for field in dataclasses.fields(LearnerSettings)}
    if wrong := sorted(map(str, kinds.keys() ^ values.keys())):
        raise ValueError(f"the setting `{wrong[0]}` is {'missing' if wrong[0] in kinds else 'unknown'}.")
    for name, value in values.items():
        # A whole number is allowed for a float.
        if type(value) is not kinds[name] and not (kinds[name] is float and type(value) is int):
            raise ValueError(f"`{name}` is {value!r:.40}; it must be a {kinds[name].__name__}.")
    return LearnerSettings(**values)


def _check_meter(meter: dict[str, Any], window: int, read: int) -> None:
    recent, nats = meter.get("recent"), meter.get("nats")
    if meter.keys() != {"recent", "count", "nats"}:
        raise ValueError(f"`meter` has {sorted(map(str, meter))!r:.60}; it must have recent, count and nats.")
    _integer("meter.count", meter["count"], read)
    if type(nats) not in (int, float) or not math.isfinite(nats):
        raise ValueError(f"`meter.nats` is {nats!r:.40}; it must be a finite number.")
    if not isinstance(recent, torch.Tensor) or recent.dtype != torch.float64 or recent.shape != (window,):
        raise ValueError(f"`meter.recent` is not a tensor of {window} numbers of float64.")
    if not bool(recent.isfinite().all()):
        raise ValueError("`meter.recent` has a NaN or infinite number.")


def _check_tokens(name: str, item: Any, count: int) -> None:
    """Raise a ValueError unless `item` is a tuple of `count` token ids, and True if an episode begins there."""
    if not isinstance(item, tuple) or len(item) != count + 1 or type(item[-1]) is not bool:
        raise ValueError(f"`{name}` has {item!r:.40}; it must be {count} token ids and a boolean.")
    for token in item[:-1]:
        _integer(name, token, _LARGEST)


def _integer(name: str, value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"`{name}` has {value!r:.40}; it must be an integer from 0 to {most}.")
    return value
