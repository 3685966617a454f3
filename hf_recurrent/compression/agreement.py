"""The header of an archive: model, settings and arithmetic, which have to be the same on both sides."""

import copy
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.compression.adaptive_predictor import AdaptivePredictor, AdaptiveSettings
from hf_recurrent.compression.archive import ArchiveError, Header
from hf_recurrent.compression.predictors import FrozenPredictor, Predictor, arithmetic_fingerprint, check_model
from hf_recurrent.weight_hashing import weights_hash

_LARGEST_STREAMS = 256
_PROBE_STRIDE = 8  # so that the fingerprint includes updates of the weights


def new_header(
    model: PreTrainedModel,
    size: int,
    adaptive: AdaptiveSettings | None = None,
    streams: int = 1,
    **others: Any,
) -> Header:
    """The header of an archive that is made here.

    Args:
        model: a recurrent byte-level model on the CPU.
        size: bytes of the data.
        adaptive: how the model learns from the data; None for fixed weights.
        streams: B, parts that are coded side by side; 1 if the model learns.
        others: JSON values for the settings.

    Raises:
        ValueError: the model does not read bytes or is on another device, or `streams` is not allowed.
    """
    check_model(model)
    if model.device.type != "cpu":
        raise ValueError(f"`model` is on {model.device}; compression needs the exact arithmetic of the CPU.")
    if isinstance(streams, bool) or not isinstance(streams, int) or not 1 <= streams <= _LARGEST_STREAMS:
        raise ValueError(f"`streams` is {streams!r}; it must be an integer from 1 to {_LARGEST_STREAMS}.")
    if adaptive is not None and streams > 1:
        raise ValueError(f"`streams` is {streams}; a model that learns reads one stream.")
    settings = dict(others)
    if streams > 1:
        settings["streams"] = streams
    if adaptive is not None:
        default = asdict(AdaptiveSettings())
        settings["adaptive"] = {name: value for name, value in asdict(adaptive).items() if value != default[name]}
    fingerprint = _fingerprint(model, settings)
    return Header(size, weights_hash(model)[:16], fingerprint, kernel_name(), settings)


def new_predictor(header: Header, model: PreTrainedModel) -> Predictor:
    """The predictor of an archive with this header.

    Raises:
        ArchiveError: the settings are not those of an archive.
    """
    try:
        return _predictor(model, header.size, header.settings)
    except (TypeError, ValueError) as error:
        raise ArchiveError(f"its header is damaged: {error}") from error


def check_header(header: Header, model: PreTrainedModel) -> None:
    """Raise an ArchiveError unless this model, on this machine, computes the probabilities of the archive."""
    check_model(model)
    if weights_hash(model)[:16] != header.weights:
        raise ArchiveError(
            f"it was made with other weights (hash {header.weights}) than those of this model "
            f"({weights_hash(model)[:16]})."
        )
    try:
        fingerprint = _fingerprint(model, header.settings)
    except (TypeError, ValueError) as error:
        raise ArchiveError(f"its header is damaged: {error}") from error
    if fingerprint != header.fingerprint:
        raise ArchiveError(
            f"the model computes other probabilities here ({kernel_name()}) than where it was made "
            f"({header.kernel}); decode it on a machine, and with a version of torch, like those."
        )


def kernel_name() -> str:
    """Version of torch and instruction set, in a few characters."""
    try:
        from hf_recurrent.kernels.linear_scan_cpu import instruction_set

        return f"{torch.__version__.partition('+')[0]} {instruction_set()}"
    except ImportError:
        return torch.__version__.partition("+")[0]


def _predictor(model: PreTrainedModel, size: int, settings: dict[str, Any]) -> Predictor:
    streams, adaptive = settings.get("streams", 1), settings.get("adaptive")
    if isinstance(streams, bool) or not isinstance(streams, int) or not 1 <= streams <= _LARGEST_STREAMS:
        raise ValueError(f"`streams` is {streams!r}; it must be an integer from 1 to {_LARGEST_STREAMS}.")
    if adaptive is None:
        return FrozenPredictor(model, streams)
    return AdaptivePredictor(model, size, AdaptiveSettings(**adaptive))


def _fingerprint(model: PreTrainedModel, settings: dict[str, Any]) -> str:
    if settings.get("adaptive") is None:
        return arithmetic_fingerprint(_predictor(model, 0, settings))
    adaptive = replace(AdaptiveSettings(**settings["adaptive"]), stride=_PROBE_STRIDE)
    return arithmetic_fingerprint(AdaptivePredictor(copy.deepcopy(model), 0, adaptive))
