"""Addresses of tensors: every pointer that a compiled kernel gets is checked here, because the kernel checks none."""

from collections.abc import Iterable, Sequence
from operator import attrgetter, le, mul

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)
_CPU = torch.device("cpu")
_shape, _is_cpu, _dtype, _layout = map(attrgetter, ("shape", "is_cpu", "dtype", "layout"))
_storage, _held_bytes = Tensor.untyped_storage, torch.UntypedStorage.nbytes


class UnreadableTensor(ValueError):
    """A tensor that a kernel cannot read or write."""


def check_readable(
    name: str, tensor: Tensor, dtype: torch.dtype, elements: int, device: torch.device = _CPU, *, strided: bool = False
) -> None:
    """Raise [`UnreadableTensor`] unless the tensor is that many elements of that type in memory on `device`.

    They must be contiguous; with `strided` they may lie anywhere in the tensor's storage.
    """
    if type(tensor) not in _PLAIN:
        problem = f"is of type {type(tensor).__name__}; it must be a torch.Tensor"
    elif tensor.layout is not torch.strided:
        problem = f"has layout {tensor.layout}; it must be torch.strided"
    elif tensor.dtype is not dtype:
        problem = f"has type {tensor.dtype}; it must be {dtype}"
    elif tensor.device != device:
        problem = f"is on {tensor.device}; it must be on {device}"
    elif tensor.numel() != elements:
        problem = f"has {tensor.numel()} elements; it must have {elements}"
    elif tensor.is_neg() or (dtype.is_complex and tensor.is_conj()):
        problem = "is lazily negated or conjugated; it must hold its own values"
    elif not (strided or tensor.is_contiguous()):
        problem = f"has strides {tensor.stride()}; it must be contiguous"
    elif (held := tensor.untyped_storage().nbytes()) < (needed := _required_bytes(tensor)):
        problem = f"needs {needed} bytes, but its storage has {held}: its memory was freed or shrunk"
    else:
        return
    raise UnreadableTensor(f"`{name}` {problem}.")


def address(name: str, tensor: Tensor, dtype: torch.dtype, elements: int, *, strided: bool = False) -> int:
    """The address of a tensor on the CPU that passes [`check_readable`]."""
    usual = (  # the same checks in a form that takes half the time, for steps that take microseconds
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype is dtype
        and tensor.numel() == elements
        and not (tensor.is_neg() or (dtype.is_complex and tensor.is_conj()))
        and (strided or tensor.is_contiguous())
        and _required_bytes(tensor) <= tensor.untyped_storage().nbytes()
    )
    if usual and (pointer := tensor.data_ptr()):
        return pointer
    check_readable(name, tensor, dtype, elements, strided=strided)
    pointer = tensor.data_ptr()
    if elements and not pointer:
        raise UnreadableTensor(f"`{name}` has no memory of its own.")
    return pointer


def contiguous_addresses(
    names: Sequence[str], tensors: Sequence[Tensor], shapes: Sequence[torch.Size], dtype: torch.dtype
) -> list[int]:
    """[`address`] of tensors that also have these shapes, with fewer steps of Python for all of them together."""
    usual = (
        all(map(_PLAIN.__contains__, map(type, tensors)))
        and [*map(_shape, tensors)] == shapes
        and all(map(_is_cpu, tensors))
        and all(map(Tensor.is_contiguous, tensors))
        and {*map(_dtype, tensors)} == {dtype}
        and {*map(_layout, tensors)} == {torch.strided}
        and not any(map(Tensor.is_neg, tensors))
        and all(map(le, map(_required_bytes, tensors), map(_held_bytes, map(_storage, tensors))))
    )
    if usual and not dtype.is_complex and all(pointers := [*map(Tensor.data_ptr, tensors)]):
        return pointers
    check_shapes({name: pair for name, *pair in zip(names, tensors, shapes, strict=True)})
    return [address(name, x, dtype, x.numel()) for name, x in zip(names, tensors, strict=True)]


def addresses(tensors: dict[str, Tensor], sizes: Iterable[tuple[str, int]], dtype: torch.dtype) -> list[int]:
    """[`address`] of each named tensor with that many elements."""
    return [address(name, tensors[name], dtype, elements) for name, elements in sizes]


def check_shapes(shaped: dict[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Raise [`UnreadableTensor`] unless each tensor that is given has the given shape."""
    for name, (tensor, shape) in shaped.items():
        if tensor is not None and tensor.shape != shape:
            raise UnreadableTensor(f"`{name}` has shape {tuple(tensor.shape)}; it must be {tuple(shape)}.")


def check_lookups(lookups: Tensor, rows: int) -> None:
    """Raise an IndexError unless all lookups are numbers of rows of a table with so many."""
    if lookups.numel():
        least, most = torch.aminmax(lookups)
        if least < 0 or most >= rows:
            raise IndexError(f"`lookups` has rows {int(least)} to {int(most)}; the table has {rows} rows.")


def _required_bytes(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        elements = tensor.numel()
    else:  # not empty: an empty tensor is contiguous
        elements = 1 + sum(map(mul, tensor.shape, strides := tensor.stride())) - sum(strides)
    return (tensor.storage_offset() + elements) * tensor.element_size() if elements else 0
