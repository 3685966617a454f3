"""Agreement of compressor and decompressor on model, settings and arithmetic, by the header of an archive.

Nothing here imports torch before a model is given.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hf_recurrent.argument_checks import check_integer
from hf_recurrent.compression.archive import ArchiveError, Header, NetworkRecord
from hf_recurrent.compression.byte_coding import ByteCoding, Counts, counts_version, empty_counts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_recurrent.compression.adaptive_predictor import AdaptiveSettings
    from hf_recurrent.compression.predictors import Predictor


_SEED = 0
# 152,000 dense weights: on texts up to a megabyte, four times as many save nothing, and take three times as long.
_SIZES = {"hidden_size": 64, "state_size": 96, "num_hidden_layers": 2, "intermediate_size": 192}
_TABLES = {"ngram_orders": [2, 3, 4, 5, 6], "ngram_rows": 1 << 16}
# By the number in the settings of archives: the first had no tables of n-grams.
_SIZES_OF = {1: _SIZES, 2: _SIZES | _TABLES}
NEWEST = 2


def new_network(number: int = NEWEST) -> "PreTrainedModel":
    """A `memora-tiny` of half its width with new weights, always the same; archives name it by its number."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_recurrent.presets import config_from_preset

    if number not in _SIZES_OF:
        raise ValueError(f"`number` is {number!r}; it must be one of {', '.join(map(str, _SIZES_OF))}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **_SIZES_OF[number])).eval()


_MOST_STREAMS = 256
_NEW = "new"  # key of the JSON settings
_PROBE_STRIDE = 8  # so that the fingerprint includes updates of the weights


def new_header(
    model: "PreTrainedModel | None",
    size: int,
    adaptive: "AdaptiveSettings | None" = None,
    streams: int = 1,
    mixes: bool = True,
    is_new: bool = False,
) -> Header:
    """The header of an archive of `size` bytes that is made here; the other arguments are as for [`compress`].

    Args:
        is_new: `model` is the [`new_network`], which a decoder makes again.
    """
    check_integer("streams", streams, 1, _MOST_STREAMS)
    if model is None:
        if adaptive is not None or streams > 1 or not mixes:
            raise ValueError("`streams` and `mixes` are for a network; without `model`, counts predict alone.")
        return Header(size, counts_version())
    from hf_recurrent.compression.adaptive_predictor import AdaptiveSettings
    from hf_recurrent.compression.predictors import check_model
    from hf_recurrent.learning_rules.compiled_program import Uncompilable

    check_model(model)
    if model.device.type != "cpu":
        raise ValueError(f"`model` is on {model.device}; compression needs the exact arithmetic of the CPU.")
    if adaptive is not None and streams > 1:
        raise ValueError(f"`streams` is {streams}; a model that learns reads one stream.")
    # Values that differ from the defaults.
    settings: dict[str, Any] = {"streams": streams} if streams > 1 else {}
    if adaptive is not None:
        default = asdict(AdaptiveSettings())
        settings["adaptive"] = {name: value for name, value in asdict(adaptive).items() if value != default[name]}
    if is_new:
        settings[_NEW] = NEWEST
    try:
        fingerprint = _fingerprint(model, settings)
    except Uncompilable:  # plain torch on both sides
        settings["adaptive"]["compiled"] = False
        fingerprint = _fingerprint(model, settings)
    network = NetworkRecord(_hash(model), fingerprint, kernel_name())
    has_own = getattr(model, "count_memory", None) is not None
    return Header(size, counts_version(large=not has_own) if mixes else 0, network, settings)


def model_of(header: Header, model: "PreTrainedModel | None") -> "PreTrainedModel | None":
    """The model that was given, or, for an archive that needs no other, its new network."""
    number = header.settings.get(_NEW)
    if model is not None or header.network is None or not number:
        return model
    try:
        return new_network(number)
    except (TypeError, ValueError) as error:
        raise ArchiveError(f"hf-recurrent {header.release} made it, with new network {number!r}: {error}") from error


@contextmanager
def new_coding(header: Header, model: "PreTrainedModel | None") -> Iterator[ByteCoding]:
    """The coding of a header that [`new_header`] made or [`check_header`] has checked.

    Inside the block, `model` is without its count memory, which the coding has a copy of.
    """
    streams, counts = header.settings.get("streams", 1), None
    if header.counts:
        counts = _counts_of(model) or empty_counts(header.size, large=header.counts == counts_version())
    if model is None:
        yield ByteCoding(streams, None, counts)
        return
    from hf_recurrent.evaluation.counts_alone import network_alone

    with network_alone(model):
        yield ByteCoding(streams, _new_predictor(header.settings, model, header.size), counts)


def check_header(header: Header, model: "PreTrainedModel | None") -> None:
    """Raise an ArchiveError unless this model, on this machine, computes the probabilities of the archive."""
    versions = counts_version(large=False), counts_version()
    if header.counts not in (0, *versions):
        raise ArchiveError(
            f"hf-recurrent {header.release} made it, with version {header.counts} of the count memory; this release "
            f"has versions {versions[0]} and {versions[1]}. Decompress it with the release that made it."
        )
    network = header.network
    if network is None:
        if model is not None:
            raise ArchiveError("it was made by counts alone; decompress it without a model.")
        if header.settings:
            raise ArchiveError("its header is damaged.")
        return
    if model is None:
        raise ArchiveError(f"it was made with a model (hash of the weights {network.weights}); give that model too.")
    from hf_recurrent.compression.predictors import check_model
    from hf_recurrent.learning_rules.compiled_program import Uncompilable

    check_model(model)
    if (weights := _hash(model)) != network.weights:
        raise ArchiveError(f"it was made with other weights (hash {network.weights}) than this model's ({weights}).")
    try:
        check_integer("streams", header.settings.get("streams", 1), 1, _MOST_STREAMS)
        _learning(header.settings)
    except (TypeError, ValueError) as error:
        raise ArchiveError(f"its header is damaged: {error}") from error
    try:
        fingerprint = _fingerprint(model, header.settings)
    except Uncompilable as error:
        raise ArchiveError(f"it was made with a compiled kernel that cannot be used here: {error}.") from error
    if fingerprint != network.fingerprint:
        raise ArchiveError(
            f"the model computes other probabilities here ({kernel_name()}) than where it was made "
            f"({network.kernel}); decode it on such a machine, with that version of torch."
        )


def kernel_name() -> str:
    """Version of torch and instruction set, in a few characters."""
    import torch

    try:
        from hf_recurrent.kernels.linear_scan_cpu import instruction_set

        return f"{torch.__version__.partition('+')[0]} {instruction_set()}"
    except ImportError:
        return torch.__version__.partition("+")[0]


def _hash(model: "PreTrainedModel") -> str:
    from hf_recurrent.checkpoints.weight_hashing import weights_hash

    return weights_hash(model)[:16]


def _learning(settings: dict[str, Any]) -> "AdaptiveSettings | None":
    from hf_recurrent.compression.adaptive_predictor import AdaptiveSettings

    adaptive = settings.get("adaptive")
    return None if adaptive is None else AdaptiveSettings(**adaptive)


def _new_predictor(settings: dict[str, Any], model: "PreTrainedModel", size: int) -> "Predictor":
    if (adaptive := _learning(settings)) is None:
        from hf_recurrent.compression.predictors import FrozenPredictor

        return FrozenPredictor(model, settings.get("streams", 1))
    from hf_recurrent.compression.adaptive_predictor import AdaptivePredictor

    return AdaptivePredictor(model, size, adaptive)


def _counts_of(model: "PreTrainedModel | None") -> Counts | None:
    """A copy of the model's own count memory."""
    memory = getattr(model, "count_memory", None)
    if memory is None:
        return None
    return Counts(memory.shape, {name: array.copy() for name, array in memory.arrays().items()})


def _fingerprint(model: "PreTrainedModel", settings: dict[str, Any]) -> str:
    from hf_recurrent.compression.predictors import arithmetic_fingerprint
    from hf_recurrent.evaluation.counts_alone import network_alone

    with network_alone(model):
        if settings.get("adaptive") is not None:
            model = copy.deepcopy(model)
            settings = settings | {"adaptive": settings["adaptive"] | {"stride": _PROBE_STRIDE}}
        return arithmetic_fingerprint(_new_predictor(settings, model, 0))
