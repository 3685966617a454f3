"""The files of a saved learner, checked before anything of them is used.

Checksums detect accidents. The values are checked too, because the files may come from an untrusted source.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent.checkpoints.files import (
    load_tree,
    new_staging_directory,
    publish_directory,
    read_json,
    reading_checkpoint,
    save_tree,
    writing_checkpoint,
)
from hf_recurrent.checkpoints.manifest import MANIFEST_FILE, check_manifest, write_manifest
from hf_recurrent.checkpoints.weights import check_weights
from hf_recurrent.hub.loading import load_model, load_tokenizer
from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.online.block_step import aligned
from hf_recurrent.online.settings import LearnerSettings

if TYPE_CHECKING:
    from hf_recurrent.online.learner import OnlineLearner


FORMAT = 2
_LATER_SETTINGS = {"table_learning_rate"}  # learners of earlier versions saved none
_LARGEST = 2**63 - 1
_NAMES = {
    "format", "settings", "bytes_read", "updates", "metadata", "meter", "last", "waiting", "state", "carried",
    "summed", "gradients", "optimizer",
}  # fmt: skip


def check_values(tree: dict[str, Any]) -> dict[str, Any]:
    """The values of learner.json, with the settings as [`LearnerSettings`].

    A ValueError names the first value that is missing, unknown, or that no learner saves; a value of another type may
    raise an AttributeError, LookupError or TypeError.
    """
    if wrong := sorted(map(str, _NAMES ^ tree.keys())):
        raise ValueError(f"`{wrong[0]}` is {'missing' if wrong[0] in _NAMES else 'unknown'}.")
    known = {field.name for field in dataclasses.fields(LearnerSettings)}
    if not known - _LATER_SETTINGS <= tree["settings"].keys() <= known:
        raise ValueError("`settings` lacks a setting, or has an unknown one.")
    settings, read = LearnerSettings(**tree["settings"]), tree["bytes_read"]
    last, waiting = tree["last"], tree["waiting"]
    allowed = {
        "settings": all(type(tree["settings"][name]) is bool for name in ("binary", "learn")),
        "format": tree["format"] == FORMAT,
        "bytes_read": _is_count(read, _LARGEST),
        "updates": _is_count(tree["updates"], read),
        "metadata": isinstance(tree["metadata"], dict),
        "meter": _is_meter(tree["meter"], settings.window, read),
        "last": last is None or _are_tokens(last, 1),
        "waiting": isinstance(waiting, list)
        and len(waiting) <= read
        and all(_are_tokens(item, 2) for item in waiting),
        "summed": _is_summed(tree["summed"], settings),
        "optimizer": isinstance(tree["optimizer"], dict if settings.learn else type(None)),
    }
    for name in ("state", "carried", "gradients"):
        pairs = tree[name].items()
        allowed[name] = all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in pairs)
    for name, is_allowed in allowed.items():
        if not is_allowed:
            raise ValueError(f"`{name}` is {tree[name]!r:.40}, which no learner saves.")
    return tree | {"settings": settings}


def check_tensors(part: str, stored: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Raise a ValueError that names the first stored tensor without a counterpart of the same shape and kind."""
    for name, tensor in stored.items():
        if name not in own:
            raise ValueError(f"its `{part}` has `{name}`, which the model does not have.")
        wanted = own[name]
        kinds = [(each.shape, each.is_floating_point(), each.is_complex()) for each in (tensor, wanted)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"its `{part}` has `{name}` with shape {tuple(tensor.shape)} and type {tensor.dtype}, but the model "
                f"needs {tuple(wanted.shape)} and {wanted.dtype}."
            )


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _are_tokens(item: Any, count: int) -> bool:
    """True for a tuple of `count` token ids, and a boolean: an episode begins there."""
    if not isinstance(item, tuple) or len(item) != count + 1 or type(item[-1]) is not bool:
        return False
    return all(_is_count(token, _LARGEST) for token in item[:-1])


def _is_meter(meter: dict[str, Any], window: int, read: int) -> bool:
    recent, nats = meter["recent"], meter["nats"]
    is_window = recent.dtype == torch.float64 and recent.shape == (window,) and bool(recent.isfinite().all())
    return is_window and _is_count(meter["count"], read) and type(nats) in (int, float) and math.isfinite(nats)


def _is_summed(summed: Any, settings: LearnerSettings) -> bool:
    """True for the blocks and the bytes in the gradients since the last update."""
    blocks, count = summed
    return _is_count(blocks, settings.update_every - 1) and type(count) is int and count == blocks * settings.stride


_NAME = "learner"


def save_learner(learner: "OnlineLearner", directory: str | os.PathLike) -> None:
    """Write model, tokenizer and learner; see [`OnlineLearner.save`]."""
    directory = Path(directory).absolute()
    empty = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not empty and not is_saved_learner(directory):
        raise ValueError(f"`directory` is {str(directory)!r}; it must be new, empty or a saved learner.")
    with writing_checkpoint(directory):
        staging = new_staging_directory(directory)
        learner.save_model(staging)
        save_tree({"format": FORMAT} | learner_tree(learner), staging, _NAME)
        write_manifest(staging)
        publish_directory(staging, directory)


def learner_tree(learner: "OnlineLearner") -> dict[str, Any]:
    """All values of a learner but its weights."""
    stream = learner.stream
    return {
        "settings": dataclasses.asdict(learner.settings),
        "bytes_read": learner.bytes_read,
        "updates": learner.updates,
        "metadata": learner.metadata,
        "meter": learner.meter.state_dict(),
        "last": stream.last,
        "waiting": stream.waiting,
        "state": stream.state,
        "carried": stream.carried,
        **learner.step.saved_values(),
    }


def restore_learner(learner: "OnlineLearner", tree: dict[str, Any]) -> None:
    """Continue from values that [`read_saved_learner`] has checked; a ValueError if they do not match the model."""
    stream, vocab_size = learner.stream, learner.model.config.vocab_size
    tokens = [token for *item, _ in (*tree["waiting"], tree["last"] or [False]) for token in item]
    if tokens and max(tokens) >= vocab_size:
        raise ValueError(f"it has the token {max(tokens)}; the vocabulary size is {vocab_size}.")
    learner.bytes_read, learner.step.updates, learner.metadata = tree["bytes_read"], tree["updates"], tree["metadata"]
    learner.meter.load_state_dict(tree["meter"])
    stream.last, stream.waiting = tree["last"], tree["waiting"]
    stream.state = _like("state", tree["state"], stream.state)
    if learner.settings.learn and tree["settings"].learn:
        check_tensors("gradients", tree["gradients"], learner.step.parameters)
        stream.carried = _like("carried", tree["carried"], stream.carried)
        learner.step.restore(tree)


def is_saved_learner(directory: str | os.PathLike) -> bool:
    """True if the directory has the files of [`OnlineLearner.save`], damaged or not."""
    return all(os.path.isfile(_file(directory, kind)) for kind in ("json", "safetensors"))


def check_files(directory: str | os.PathLike) -> None:
    """Raise a ValueError that names the first file of a saved learner that is missing or damaged."""
    with reading_checkpoint(directory):
        if is_saved_learner(directory) or os.path.lexists(os.path.join(directory, MANIFEST_FILE)):
            check_manifest(directory)
    if not is_saved_learner(directory):
        raise ValueError(f"`directory` is {os.fspath(directory)!r}; it must be a saved learner.")


def read_saved_learner(directory: str | os.PathLike) -> dict[str, Any]:
    """The values that [`OnlineLearner.save`] wrote, checked, their settings as [`LearnerSettings`]."""
    check_files(directory)
    with reading_checkpoint(_file(directory, "json")) as path:
        _check_references(read_json(path), _file(directory, "safetensors"))
        tree = load_tree(directory, _NAME)
        try:
            return check_values(tree)
        except ValueError as error:
            raise ValueError(f"The checkpoint file `{path}` is damaged: {error}") from error


def load_saved_model(directory: str | os.PathLike, *, trust_remote_code: bool = False) -> tuple[PreTrainedModel, Any]:
    """The model of a saved learner, whose weights are checked, and its tokenizer or None."""
    options = {"argument": "directory", "trust_remote_code": trust_remote_code}
    model = load_model(AutoModelForCausalLM, directory, dtype="auto", **options)
    check_weights(model, directory)
    has_tokenizer = os.path.isfile(os.path.join(directory, "tokenizer_config.json"))
    return model, load_tokenizer(directory, **options) if has_tokenizer else None


def _like(part: str, stored: Mapping[str, torch.Tensor], own: RecurrentState) -> RecurrentState:
    """A stored state, checked, with the types and device of the learner's own."""
    check_tensors(part, stored, own)
    if missing := sorted(own.keys() - stored.keys()):
        raise ValueError(f"its `{part}` lacks `{missing[0]}`.")
    return {name: aligned(stored[name].to(tensor)) for name, tensor in own.items()}


def _file(directory: str | os.PathLike, kind: str) -> str:
    return os.path.join(directory, f"{_NAME}.{kind}")


def _check_references(content: Any, path: str) -> None:
    """Raise a ValueError unless learner.json refers to every tensor of the file exactly once."""
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
