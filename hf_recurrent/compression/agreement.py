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
) -> Header:
    """The header of an archive that is made here.

    Args:
        model: a recurrent byte-level model on the CPU.
        size: bytes of the data.
        adaptive: how the model learns from the data; None for fixed weights.
        streams: B, parts that are coded side by side; 1 if the model learns.

    Raises:
        ValueError: the model does not read bytes or is on another device, or `streams` is not allowed.
    """
    check_model(model)
    if model.device.type != "cpu":
        raise ValueError(f"`model` is on {model.device}; compression needs the exact arithmetic of the CPU.")
    _check_streams(streams)
    if adaptive is not None and streams > 1:
        raise ValueError(f"`streams` is {streams}; a model that learns reads one stream.")
    settings: dict[str, Any] = {"streams": streams} if streams > 1 else {}
    if adaptive is not None:
        default = asdict(AdaptiveSettings())
        settings["adaptive"] = {name: value for name, value in asdict(adaptive).items() if value != default[name]}
    return Header(size, _weights(model), _fingerprint(model, settings), kernel_name(), settings)


def new_predictor(header: Header, model: PreTrainedModel) -> Predictor:
    """The predictor of a header that [`new_header`] made or [`check_header`] has checked."""
    return _predictor(model, header.size, *_parsed(header.settings))


def check_header(header: Header, model: PreTrainedModel) -> None:
    """Raise an ArchiveError unless this model, on this machine, computes the probabilities of the archive."""
    check_model(model)
    weights = _weights(model)
    if weights != header.weights:
        raise ArchiveError(
            f"it was made with other weights (hash {header.weights}) than those of this model ({weights})."
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


def _weights(model: PreTrainedModel) -> str:
    return weights_hash(model)[:16]


def _check_streams(streams: Any) -> None:
    if isinstance(streams, bool) or not isinstance(streams, int) or not 1 <= streams <= _LARGEST_STREAMS:
        raise ValueError(f"`streams` is {streams!r}; it must be an integer from 1 to {_LARGEST_STREAMS}.")


def _parsed(settings: dict[str, Any]) -> tuple[int, AdaptiveSettings | None]:
    streams, adaptive = settings.get("streams", 1), settings.get("adaptive")
    _check_streams(streams)
    return streams, None if adaptive is None else AdaptiveSettings(**adaptive)


def _predictor(model: PreTrainedModel, size: int, streams: int, adaptive: AdaptiveSettings | None) -> Predictor:
    return FrozenPredictor(model, streams) if adaptive is None else AdaptivePredictor(model, size, adaptive)


def _fingerprint(model: PreTrainedModel, settings: dict[str, Any]) -> str:
    streams, adaptive = _parsed(settings)
    if adaptive is not None:
        model, adaptive = copy.deepcopy(model), replace(adaptive, stride=_PROBE_STRIDE)
    return arithmetic_fingerprint(_predictor(model, 0, streams, adaptive))
