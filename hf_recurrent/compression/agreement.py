"""Agreement of compressor and decompressor on model, settings and arithmetic, by the header of an archive."""

import copy
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.argument_checks import check_integer
from hf_recurrent.checkpoints.weight_hashing import weights_hash
from hf_recurrent.compression.adaptive_predictor import AdaptivePredictor, AdaptiveSettings
from hf_recurrent.compression.archive import ArchiveError, Header
from hf_recurrent.compression.mixed_predictor import MixedPredictor, build_mixture, can_mix
from hf_recurrent.compression.predictors import FrozenPredictor, Predictor, arithmetic_fingerprint, check_model
from hf_recurrent.learning_rules.compiled_program import Uncompilable

_MOST_STREAMS = 256
_PROBE_STRIDE = 8  # so that the fingerprint includes updates of the weights
_MIXES = "m"  # key of the JSON settings; short, because the header counts in the size


def new_header(
    model: PreTrainedModel,
    size: int,
    adaptive: AdaptiveSettings | None = None,
    streams: int = 1,
    mixes: bool = True,
) -> Header:
    """The header of an archive of `size` bytes that is made here; the other arguments are those of [`compress`].

    Raises:
        ValueError: the model does not read bytes or is on another device, or `streams` is not allowed.
    """
    check_model(model)
    if model.device.type != "cpu":
        raise ValueError(f"`model` is on {model.device}; compression needs the exact arithmetic of the CPU.")
    check_integer("streams", streams, 1, _MOST_STREAMS)
    if adaptive is not None and streams > 1:
        raise ValueError(f"`streams` is {streams}; a model that learns reads one stream.")
    # Values that differ from the defaults.
    settings: dict[str, Any] = {"streams": streams} if streams > 1 else {}
    if adaptive is not None:
        default = asdict(AdaptiveSettings())
        settings["adaptive"] = {name: value for name, value in asdict(adaptive).items() if value != default[name]}
    if not (mixes and can_mix()):
        settings[_MIXES] = 0
    try:
        fingerprint = _fingerprint(model, settings)
    except Uncompilable:  # plain torch on both sides
        settings["adaptive"]["compiled"] = False
        fingerprint = _fingerprint(model, settings)
    return Header(size, weights_hash(model)[:16], fingerprint, kernel_name(), settings)


def new_predictor(header: Header, model: PreTrainedModel) -> Predictor:
    """The predictor of a header that [`new_header`] made or [`check_header`] has checked."""
    return _new_predictor(header.settings, model, header.size)


def _new_predictor(settings: dict[str, Any], model: PreTrainedModel, size: int) -> Predictor:
    streams, adaptive = settings.get("streams", 1), _learning(settings)
    if adaptive is None:
        predictor: Predictor = FrozenPredictor(model, streams)
    else:
        predictor = AdaptivePredictor(model, size, adaptive)
    return MixedPredictor(predictor, build_mixture(streams, size)) if settings.get(_MIXES, 1) else predictor


def _learning(settings: dict[str, Any]) -> AdaptiveSettings | None:
    adaptive = settings.get("adaptive")
    return None if adaptive is None else AdaptiveSettings(**adaptive)


def check_header(header: Header, model: PreTrainedModel) -> None:
    """Raise an ArchiveError unless this model, on this machine, computes the probabilities of the archive."""
    check_model(model)
    weights = weights_hash(model)[:16]
    if weights != header.weights:
        raise ArchiveError(f"it was made with other weights (hash {header.weights}) than this model's ({weights}).")
    try:
        check_integer("streams", header.settings.get("streams", 1), 1, _MOST_STREAMS)
        _learning(header.settings)
    except (TypeError, ValueError) as error:
        raise ArchiveError(f"its header is damaged: {error}") from error
    try:
        fingerprint = _fingerprint(model, header.settings)
    except Uncompilable as error:
        raise ArchiveError(f"it was made with a compiled kernel that cannot be used here: {error}.") from error
    if fingerprint != header.fingerprint:
        raise ArchiveError(
            f"the model computes other probabilities here ({kernel_name()}) than where it was made "
            f"({header.kernel}); decode it on such a machine, with that version of torch."
        )


def kernel_name() -> str:
    """Version of torch and instruction set, in a few characters."""
    try:
        from hf_recurrent.kernels.linear_scan_cpu import instruction_set

        return f"{torch.__version__.partition('+')[0]} {instruction_set()}"
    except ImportError:
        return torch.__version__.partition("+")[0]


def _fingerprint(model: PreTrainedModel, settings: dict[str, Any]) -> str:
    if settings.get("adaptive") is not None:
        model = copy.deepcopy(model)
        settings = settings | {"adaptive": settings["adaptive"] | {"stride": _PROBE_STRIDE}}
    return arithmetic_fingerprint(_new_predictor(settings, model, 0))
