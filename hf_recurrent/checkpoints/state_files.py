"""Files of states: safetensors with a checksum, and the hash of the weights that they belong to.

Shape letters: B streams.
"""

import hashlib
import json
import os
from collections.abc import Callable, Container, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.atomic_files import atomic_file
from hf_recurrent.checkpoints.files import pack_tensors, unpack_tensors
from hf_recurrent.checkpoints.weight_hashing import weights_hash
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, check_state
from hf_recurrent.stock_models.with_state import check_recurrent, with_state

# The format of files, independent of the module's name. The second one had no checksum.
_FORMAT = "hf_recurrent.state.3"
_FORMATS = ("hf_recurrent.state.2", _FORMAT)
_CHECKSUM = "sha256"

StateCheck = Callable[[RecurrentState], None]


def save_state(
    state: RecurrentState, path: str | os.PathLike, model: PreTrainedModel, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state to one safetensors file, through a temporary file that is renamed.

    Args:
        state: of any number of streams.
        path: of the file.
        model: the one that the state is of; the hash of its weights is saved too ([`weights_hash`]).
        metadata: more texts by name.

    Raises:
        TypeError: the model has no recurrent state, or `state` is not a dictionary of tensors.
        ValueError: the state is not of this model, or has NaN or infinite values.
    """
    with atomic_file(path) as partial:
        partial.write_bytes(pack_state(state, model, metadata))


def load_state(
    path: str | os.PathLike, model: PreTrainedModel, device: torch.device | str | None = None
) -> RecurrentState:
    """Read a state that [`save_state`] or `hf-recurrent generate --save_state` wrote.

    Args:
        path: of the file.
        model: with the weights that the state belongs to.
        device: of the tensors; by default the model's.

    Raises:
        FileNotFoundError: `path` does not exist.
        TypeError: the model has no recurrent state.
        ValueError: the file is damaged or not a saved state, or it belongs to other weights.
    """
    return read_state(path, model, device)[0]


def read_state(
    path: str | os.PathLike, model: PreTrainedModel, device: torch.device | str | None = None
) -> tuple[RecurrentState, dict[str, str]]:
    """As [`load_state`], with the metadata."""
    check_recurrent("model", with_state(model))
    name = os.fspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"There is no saved state at `{name}`.")
    return unpack_state(Path(path).read_bytes(), name, model, device)


def pack_state(
    state: RecurrentState,
    model: PreTrainedModel,
    metadata: Mapping[str, str] | None = None,
    check: StateCheck | None = None,
) -> bytes:
    """The content of a file of [`save_state`]; see [`unpack_state`] for `check`."""
    _check(state, model, check)
    described = {**(metadata or {}), "format": _FORMAT, "weights": weights_hash(model)}
    return pack_tensors(state, described | {_CHECKSUM: _checksum(state, described)})


def unpack_state(
    data: bytes,
    name: str,
    model: PreTrainedModel,
    device: torch.device | str | None = None,
    other_weights: Container[str] = (),
    check: StateCheck | None = None,
) -> tuple[RecurrentState, dict[str, str]]:
    """The state in the content of a file, and its metadata.

    Args:
        name: of the file or argument, for errors.
        other_weights: hashes of weights, other than the model's, whose states are allowed.
        check: raises a ValueError for a state of another layout; by default, of the layout of a recurrent model.

    Raises:
        ValueError: the content is damaged or not a saved state, or it belongs to other weights.
    """
    state, metadata = unpack_tensors(data, name)
    if metadata.get("format") not in _FORMATS:
        raise ValueError(f"`{name}` is not a saved state; it must be written by `save_state` or `--save_state`.")
    weights = metadata.get("weights")
    if weights != weights_hash(model) and weights not in other_weights:
        raise ValueError(f"`{name}` belongs to other weights; a state works only with the model that saved it.")
    try:
        _check(state, model, check)
        _check_checksum(state, metadata)
    except ValueError as error:
        raise ValueError(f"`{name}` is damaged: {error}") from error
    target = model.device if device is None else device
    return {key: tensor.to(target) for key, tensor in state.items()}, metadata


def _check(state: RecurrentState, model: PreTrainedModel, check: StateCheck | None) -> None:
    if check is not None:
        check(state)
    else:
        model = with_state(model)
        check_recurrent("model", model)
        first = next(iter(state.values()), None) if isinstance(state, Mapping) else None
        streams = len(first) if isinstance(first, torch.Tensor) and first.dim() else 1
        shapes = {name: tensor.shape for name, tensor in model.init_state(max(streams, 1), "meta").items()}
        check_state(state, shapes, integer_parts=model.integer_state_parts)
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"`state[{name!r}]` has NaN or infinite values.")


def _check_checksum(state: RecurrentState, metadata: Mapping[str, str]) -> None:
    # A damaged format does not make a file one of those that had no checksum.
    if _CHECKSUM not in metadata and metadata.get("format") != _FORMAT:
        return
    described = {key: text for key, text in metadata.items() if key != _CHECKSUM}
    if metadata.get(_CHECKSUM) != _checksum(state, described):
        raise ValueError("its content does not match its checksum.")


def _checksum(state: RecurrentState, metadata: Mapping[str, str]) -> str:
    """SHA-256 of metadata, names, types, shapes and values."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(state.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
