"""Forms of tensors that callers may give: the same values stored in another way, and tensors that cannot be read."""

import random
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Subclass(torch.Tensor):
    """Behaves as a tensor; kernels cannot know that."""


def _strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def _inside(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.flatten()[:3], tensor.flatten(), tensor.flatten()[:5]])[
        min(3, tensor.numel()) : min(3, tensor.numel()) + tensor.numel()
    ].view(tensor.shape)


def _in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _imaginary(tensor: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


# Of any tensor, and only of real or complex floating-point ones.
_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": _strided,
    "transposed": _transposed,
    "inside a storage": _inside,
    "from inference mode": _in_inference_mode,
    "a subclass": lambda tensor: tensor.as_subclass(Subclass),
}
_FLOATING_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda tensor: torch._neg_view(-tensor),
    "requires grad": lambda tensor: tensor.clone().requires_grad_(),
    "a parameter": lambda tensor: nn.Parameter(tensor.clone()),
}
_COMPLEX_FORMS = {"conjugated": lambda tensor: tensor.conj_physical().conj()}


def same_values(tensor: Tensor, draw: random.Random) -> tuple[str, Tensor]:
    """The name of a form, and a tensor with the same values in that form."""
    forms = dict(_FORMS)
    if tensor.is_floating_point() or tensor.is_complex():
        forms |= _FLOATING_FORMS | (_COMPLEX_FORMS if tensor.is_complex() else {})
    if tensor.dtype in (torch.float32, torch.float64):
        forms |= {"imaginary part": _imaginary}
    name = draw.choice(list(forms))
    return name, forms[name](tensor)


def _resized(tensor: Tensor, size: Callable[[int], int]) -> Tensor:
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    tensor.untyped_storage().resize_(size(tensor.nbytes))
    return tensor


def _quantized(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.quint8)


def _nested(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(list(tensor.float().view(len(tensor), -1)), layout=torch.jagged)


_UNREADABLE: dict[str, Callable[[Tensor], object]] = {
    "freed": lambda tensor: _resized(tensor, lambda size: 0),
    "shrunk": lambda tensor: _resized(tensor, lambda size: size - 1),
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "a list": lambda tensor: tensor.tolist(),
    "an array": lambda tensor: tensor.float().numpy(),
    "text": lambda tensor: "tensor",
    "quantized": _quantized,
    "nested": _nested,
    "of no elements": lambda tensor: tensor[..., :0],
    "of one dimension": lambda tensor: tensor.flatten(),
    "of a dimension more": lambda tensor: tensor.unsqueeze(0),
    "without rows": lambda tensor: tensor[:0],
    "with a row more": lambda tensor: torch.cat([tensor, tensor[:1]]),
}


def unreadable(tensor: Tensor, draw: random.Random, but: tuple[str, ...] = ()) -> tuple[str, object]:
    """The name of a fault, and an object that stands in place of a tensor that is not empty, with that fault."""
    name = draw.choice([name for name in _UNREADABLE if name not in but])
    return name, _UNREADABLE[name](tensor.detach().as_subclass(Tensor).resolve_neg().resolve_conj())
