"""Checks of the values of a saved learner.

Checksums detect accidents. The values are checked too, because the files may come from an untrusted source.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from hf_recurrent.online.settings import LearnerSettings

FORMAT = 2
_LATER_SETTINGS = {"table_learning_rate"}  # learners of earlier versions saved none
_LARGEST = 2**63 - 1
_NAMES = {
    "format", "settings", "bytes_read", "updates", "metadata", "meter", "last", "waiting", "state", "carried",
    "summed", "gradients", "optimizer",
}  # fmt: skip


def check_values(tree: dict[str, Any]) -> dict[str, Any]:
    """The values of learner.json, with the settings as [`LearnerSettings`].

    Raises:
        ValueError: names a value that is missing, unknown, or that no learner saves.
        AttributeError, LookupError, TypeError: a value has another type than its place in the tree needs.
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
