"""Fingerprints of weights, with which a record tells whether it describes the weights at hand.

They are exact, unlike [`weights_hash`] of `weight_hashing.py`, which rounds: one step of training changes them.
"""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers.utils import is_peft_available

from hf_recurrent.checkpoints.tensor_files import whole

# Elements that are copied to the CPU at a time.
_PIECE = 1 << 24


def weights_fingerprint(model: nn.Module) -> str:
    """Fingerprint of the weights that saving the model writes: its adapter, or all parameters without one.

    It does not depend on their order and names, on the device, or on 16-bit weights being loaded as float32. Of a
    sharded model, all processes call this.
    """
    adapter = adapter_weights(model)
    return _hash(model.parameters() if adapter is None else adapter.values())


def base_weights_fingerprint(model: nn.Module) -> str:
    """Fingerprint of the parameters that do not belong to an adapter."""
    own = adapter_parameters(model)
    return _hash(parameter for name, parameter in model.named_parameters() if name not in own)


def adapter_parameters(model: nn.Module) -> set[str]:
    """Names, in the model, of the tensors of its adapter."""
    saved = adapter_weights(model) or {}
    infixes = [f"{kind}.{name}" for name in getattr(model, "peft_config", ()) for kind in (".modules_to_save", "")]
    return {name for name in model.state_dict() if any(name.replace(infix, "") in saved for infix in infixes)}


def adapter_weights(model: nn.Module) -> Mapping[str, Tensor] | None:
    """Tensors of an adapter (PEFT) by name; None for a model without one."""
    if is_peft_available():
        from peft import PeftModel, get_peft_model_state_dict

        if isinstance(model, PeftModel):
            return get_peft_model_state_dict(model)
    if getattr(model, "_hf_peft_config_loaded", False):
        return model.get_adapter_state_dict()
    return None


def _hash(tensors: Iterable[Tensor]) -> str:
    digests = sorted(_digest(tensor.detach()) for tensor in tensors)
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _digest(tensor: Tensor) -> bytes:
    tensor = whole(tensor)
    digest = hashlib.blake2b(str(tuple(tensor.shape)).encode(), digest_size=16)
    for piece in tensor.reshape(-1).split(_PIECE):
        piece = piece.cpu()
        if piece.is_floating_point() and piece.element_size() < 4:
            piece = piece.float()
        digest.update(piece.contiguous().view(torch.uint8).numpy())
    return digest.digest()
