"""Checks of the values of a saved learner, each with a ValueError that names the first wrong one.

Checksums detect accidents. The values are checked too, because the files may come from an untrusted source.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from hf_recurrent.online.settings import LearnerSettings

# 2: with a manifest. Version 1 had neither a manifest nor a version.
FORMAT = 2
_LARGEST = 2**63 - 1
_NAMES = {
    "settings", "bytes_read", "updates", "metadata", "meter", "last", "waiting", "state", "carried", "summed",
    "gradients", "optimizer",
}  # fmt: skip


def check_values(tree: Any) -> dict[str, Any]:
    """The values of learner.json, with the settings as [`LearnerSettings`].

    Raises:
        ValueError: a value is missing, unknown, or of a kind that no learner saves.
    """
    _require(isinstance(tree, dict), "learner.json", tree, "an object")
    if wrong := sorted(map(str, _NAMES ^ (tree.keys() - {"format"}))):
        raise ValueError(f"`{wrong[0]}` is {'missing' if wrong[0] in _NAMES else 'unknown'}.")
    version = tree.get("format")
    _require(version in (None, FORMAT), "format", version, f"{FORMAT} at most")
    settings = _settings(tree["settings"])
    read = tree["bytes_read"]
    _require_count("bytes_read", read, _LARGEST)
    _require_count("updates", tree["updates"], read)
    for name in ("metadata", "meter", "state", "carried", "gradients"):
        _require(isinstance(tree[name], dict), name, tree[name], "an object")
    for name in ("state", "carried", "gradients"):
        for key, value in tree[name].items():
            _require(isinstance(key, str) and isinstance(value, torch.Tensor), name, key, "the name of a tensor")
    _check_meter(tree["meter"], settings.window, read)
    last, waiting, optimizer = tree["last"], tree["waiting"], tree["optimizer"]
    _require(last is None or _are_tokens(last, 1), "last", last, "a token id and a boolean, or null")
    _require(isinstance(waiting, list) and len(waiting) <= read, "waiting", waiting, f"a list of at most {read} items")
    for item in waiting:
        _require(_are_tokens(item, 2), "waiting", item, "two token ids and a boolean")
    _check_summed(tree["summed"], settings)
    kind = dict if settings.learn else type(None)
    _require(isinstance(optimizer, kind), "optimizer", optimizer, "an object if `learn` is true, else null")
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


def _require(is_allowed: bool, name: str, value: Any, allowed: str) -> None:
    if not is_allowed:
        raise ValueError(f"`{name}` is {value!r:.40}; it must be {allowed}.")


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _require_count(name: str, value: Any, most: int) -> None:
    _require(_is_count(value, most), name, value, f"an integer from 0 to {most}")


def _are_tokens(item: Any, count: int) -> bool:
    """True for a tuple of `count` token ids, and a boolean: an episode begins there."""
    if not isinstance(item, tuple) or len(item) != count + 1 or type(item[-1]) is not bool:
        return False
    return all(_is_count(token, _LARGEST) for token in item[:-1])


def _settings(values: Any) -> LearnerSettings:
    kinds = {field.name: type(field.default) for field in dataclasses.fields(LearnerSettings)}
    _require(
        isinstance(values, dict) and values.keys() == kinds.keys(), "settings", values, "an object of all settings"
    )
    for name, value in values.items():
        is_whole = kinds[name] is float and type(value) is int  # JSON may have 1 for 1.0
        _require(type(value) is kinds[name] or is_whole, name, value, f"a {kinds[name].__name__}")
    return LearnerSettings(**values)


def _check_meter(meter: dict[str, Any], window: int, read: int) -> None:
    _require(meter.keys() == {"recent", "count", "nats"}, "meter", meter, "an object of recent, count and nats")
    recent, nats = meter["recent"], meter["nats"]
    _require_count("meter.count", meter["count"], read)
    _require(type(nats) in (int, float) and math.isfinite(nats), "meter.nats", nats, "a finite number")
    is_window = isinstance(recent, torch.Tensor) and recent.dtype == torch.float64 and recent.shape == (window,)
    is_finite = is_window and bool(recent.isfinite().all())
    _require(is_finite, "meter.recent", type(recent), f"a tensor of {window} finite float64 elements")


def _check_summed(summed: Any, settings: LearnerSettings) -> None:
    """Blocks and bytes in the gradients since the last update."""
    most = settings.update_every - 1
    is_pair = isinstance(summed, tuple) and len(summed) == 2 and _is_count(summed[0], most)
    is_allowed = is_pair and _is_count(summed[1], _LARGEST) and summed[1] == summed[0] * settings.stride
    _require(is_allowed, "summed", summed, f"at most {most} blocks and their bytes, {settings.stride} each")
