"""`provenance.json`: reading, writing, and finding the provenance of a model in memory."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.utils import cached_file, logging

from hf_recurrent.checkpoints.files import read_json, write_json
from hf_recurrent.checkpoints.fingerprints import adapter_weights, base_weights_fingerprint, weights_fingerprint
from hf_recurrent.checkpoints.privacy import hub_name, public_name, redact
from hf_recurrent.checkpoints.records import Base, Provenance, from_json

PROVENANCE_FILE = "provenance.json"
# A gap in the record.
CHANGED = "The weights were changed by something that was not recorded."
_CARD = "README.md"
_OF_MODELS: "WeakKeyDictionary[nn.Module, Provenance]" = WeakKeyDictionary()
_LOCATIONS: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()

logger = logging.get_logger(__name__)


def read_provenance(directory: str | os.PathLike) -> Provenance | None:
    """The provenance in a directory; None if it has none, a ValueError if the file is damaged."""
    path = Path(directory, PROVENANCE_FILE)
    if not os.path.lexists(path):
        return None
    content = read_json(path)
    try:
        return from_json(content)
    except ValueError as error:
        raise ValueError(f"The checkpoint file `{path}` is damaged: {error}") from error


def write_provenance(provenance: Provenance, directory: str | os.PathLike) -> None:
    """Write the file atomically, without secrets and paths of this machine; nothing for an empty provenance."""
    if not provenance.is_empty:
        write_json(_redacted(provenance.to_json()), Path(directory, PROVENANCE_FILE))


def remember_provenance(model: nn.Module, provenance: Provenance) -> None:
    """Let [`find_provenance`] find this provenance as long as the model exists."""
    _OF_MODELS[model] = provenance


def remember_location(model: nn.Module, location: str) -> None:
    """Remember the directory or repository that a model was loaded from: one with an adapter names only its base."""
    _LOCATIONS[model] = location


def find_provenance(model: nn.Module) -> Provenance:
    """A copy of the provenance of a model's weights: recorded by training in this process, or read from the
    directory or repository that it was loaded from. `gaps` names training that was not recorded.

    For a new adapter it is the provenance of the base model.
    """
    location, current = _location(model), weights_fingerprint(model)
    found = _remembered(model) or _read_if_possible(location)
    adapter, gaps = adapter_weights(model), []
    if adapter is not None and (found is None or found.weights != current) and model not in _LOCATIONS:
        inside = model.get_base_model() if hasattr(model, "get_base_model") else model  # of a PeftModel
        found = _remembered(inside) or _read_if_possible(location)
        current, gaps = base_weights_fingerprint(model), _gaps_of_adapter(adapter)
    if found is None:
        gaps += [f"The training of `{public_name(location)}` was not recorded."] if location else []
        return Provenance(weights=current, gaps=gaps)
    if found.weights != current:
        gaps.append(CHANGED)
    found.weights, found.gaps = current, list(dict.fromkeys([*found.gaps, *gaps]))
    return found


def base_of(model: nn.Module) -> Base | None:
    """The saved model that a model was loaded from, the base model of a new adapter; None for new weights."""
    location = _location(model)
    if not location:
        return None
    is_adapter_of_it = adapter_weights(model) is not None and model not in _LOCATIONS
    return Base(
        public_name(location),
        (base_weights_fingerprint if is_adapter_of_it else weights_fingerprint)(model),
        _license(location),
    )


def _remembered(model: nn.Module) -> Provenance | None:
    found = _OF_MODELS.get(model)
    return None if found is None else copy.deepcopy(found)


def _location(model: nn.Module) -> str | None:
    """The directory or repository that a model was loaded from; of an adapter whose own is not known, its base's."""
    return _LOCATIONS.get(model) or getattr(model, "name_or_path", None) or None


def _gaps_of_adapter(adapter: Mapping[str, Tensor]) -> list[str]:
    """Nothing for a new LoRA, whose second factors are zero."""
    second = [tensor for name, tensor in adapter.items() if "lora_B" in name]
    if second and not any(bool(tensor.any()) for tensor in second):
        return []
    return ["Whether the adapter was trained before is not recorded."]


def _read_if_possible(location: str | None) -> Provenance | None:
    if not location:
        return None
    path = _find_file(location, PROVENANCE_FILE)
    try:
        return None if path is None else read_provenance(Path(path).parent)
    except ValueError as error:
        logger.warning("%s The training of %s counts as not recorded.", error, location)
        return None


def _find_file(location: str, name: str) -> str | None:
    """Path of a file of a directory or repository; None if it has none, or is not reachable."""
    if os.path.isdir(location):
        path = os.path.join(location, name)
        return path if os.path.isfile(path) else None
    if hub_name(location) is None:
        return None
    try:
        return cached_file(location, name)
    except OSError:
        return None


def _license(location: str) -> str | None:
    from huggingface_hub import metadata_load

    path = _find_file(location, _CARD)
    try:
        license = (metadata_load(path) or {}).get("license") if path else None
    except (OSError, ValueError):
        return None
    return license if isinstance(license, str) else None


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return {key: _redacted(item) for key, item in value.items()} if isinstance(value, dict) else value
