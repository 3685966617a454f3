"""Content hash of a model's weights, which ties files such as saved states to their model."""

import hashlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn

_PIECE = 1 << 22  # values that are converted at a time
_SAMPLED = 64

# Model → a signature that changes with its weights, and their hash.
_known: WeakKeyDictionary[nn.Module, tuple[list, str]] = WeakKeyDictionary()


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of the weights of a model: type, names, shapes, and all values rounded to bfloat16.

    It is the same on every machine and device, and for float64, float32 and bfloat16 copies of the same weights.
    float16 copies and quantized weights are rounded otherwise and have a hash of their own. It is kept until a weight
    is replaced or changes in place.

    Raises:
        ValueError: a weight is on the meta device.
    """
    weights = dict(_weights(model))
    signature = [_signature(name, weight) for name, weight in weights.items()]
    known = _known.get(model)
    if known is None or known[0] != signature:
        _known[model] = known = signature, _hash(model, weights)
    return known[1]


def _weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that `save_pretrained` saves, sorted by name; shared ones once."""
    seen = set()
    for name, weight in sorted(model.state_dict().items()):
        if not isinstance(weight, torch.Tensor):
            continue
        if weight.is_meta:
            raise ValueError(f"`{name}` is on the meta device; load the weights first.")
        if type(weight) not in (torch.Tensor, nn.Parameter):  # quantized, by torchao
            weight = weight.dequantize()
        place = weight.data_ptr(), weight.shape, weight.stride()
        if weight.numel() and place not in seen:
            seen.add(place)
            yield name, weight.detach()


def _signature(name: str, weight: torch.Tensor) -> tuple:
    """Some values too, because changes through `.data` and in inference mode are not counted."""
    version = None if weight.is_inference() else weight._version
    flat = weight.flatten()
    places = torch.linspace(0, flat.numel() - 1, min(_SAMPLED, flat.numel()), dtype=torch.float64).long()
    return name, weight.shape, weight.data_ptr(), version, _bytes(flat[places.to(flat.device)])


def _hash(model: nn.Module, weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(str(getattr(getattr(model, "config", None), "model_type", "")).encode())
    for name, weight in weights.items():
        digest.update(f"\n{name} {tuple(weight.shape)}\n".encode())
        for piece in weight.flatten().split(_PIECE):
            digest.update(_bytes(piece))
    return digest.hexdigest()


def _bytes(values: torch.Tensor) -> bytes:
    """Values (n,), floating-point ones as bfloat16, in little-endian order."""
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    if values.is_floating_point():
        # By way of float32, so that float64 weights are rounded as their float32 copy.
        values = values.float().bfloat16().view(torch.int16)
    array = values.cpu().numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
