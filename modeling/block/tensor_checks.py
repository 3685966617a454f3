"""Checks of tensors that a caller gives, before anything computes with them, and where the numbers of weights begin.

Kernels do not check the memory that they read, and neither do many operations of torch: both end in a segmentation
fault on a tensor whose storage was freed or shrunk.

Shape letters: B streams or batch, T steps, M model width.
"""

import torch
from torch import Tensor, nn

PLAIN_TENSORS = (Tensor, nn.Parameter)
_ID_TYPES = (torch.int64, torch.int32)  # those that an embedding reads
# Asked at every step, after which a look into torch's large tables takes longer than the answer.
is_compiling, transforms_active = torch.compiler.is_compiling, torch._C._are_functorch_transforms_active
_LINE = 64  # bytes of a line of the cache, and of the widest vectors


def is_traced() -> bool:
    """True for compilers and torch.func, which need plain operations of torch."""
    return is_compiling() or transforms_active()


def has_memory(tensor: Tensor) -> bool:
    """True for strided tensors with a storage; not for subclasses and wrappers, which are left to torch."""
    return type(tensor) in PLAIN_TENSORS and not is_traced() and tensor.layout is torch.strided


def has_values(tensor: Tensor) -> bool:
    """True where Python can look at the numbers: not on the meta device, in `FakeTensorMode` or in compiled code."""
    return has_memory(tensor) and not tensor.is_meta


def align_weights(model: nn.Module) -> None:
    """Copy parameters on a CPU that begin inside of a line of the cache, except tables of which a step reads few rows.

    A file of safetensors has them behind a header of any length, and what is read from it stays where it is. A vector
    of 64 bytes then lies in two lines: a step of 128 streams took 1.6 times as long.
    """
    for module in model.modules():
        if getattr(module, "sparse_gradients", False):
            continue
        for parameter in module.parameters(recurse=False):
            if has_values(parameter) and parameter.is_cpu and parameter.data_ptr() % _LINE:
                parameter.data = parameter.detach().clone()


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise a ValueError unless the storage of a tensor that [`has_memory`] holds all of its elements."""
    if tensor.is_contiguous():
        elements = tensor.numel()
    else:  # not empty: an empty tensor is contiguous
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + elements) * tensor.element_size() if elements else 0
    if (held := tensor.untyped_storage().nbytes()) < needed:
        raise ValueError(f"`{name}` needs {needed} bytes, but its storage has {held}: its memory was freed or shrunk.")


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise a TypeError unless `tensor` is one, and a ValueError unless it is strided and its storage holds it."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"`{name}` is of type {type(tensor).__name__}; it must be a torch.Tensor.")
    if has_memory(tensor):
        check_memory(name, tensor)
    elif tensor.layout is not torch.strided:
        raise ValueError(f"`{name}` has layout {tensor.layout}; it must be torch.strided.")


def check_token_ids(name: str, token_ids: Tensor, vocab_size: int) -> None:
    """Raise a ValueError unless `token_ids` is (B, T), B ≥ 1, T ≥ 1, and, on a CPU, every id is in the vocabulary."""
    if _is_one_id(token_ids) and 0 <= token_ids.item() < vocab_size:
        return
    check_tensor(name, token_ids)
    if token_ids.dtype not in _ID_TYPES:
        raise ValueError(f"`{name}` has type {token_ids.dtype}; it must be torch.int64 or torch.int32.")
    if len(shape := token_ids.shape) != 2 or shape[0] < 1 or shape[1] < 1:
        raise ValueError(f"`{name}` has shape {tuple(shape)}; it must be (B, T) with B ≥ 1 and T ≥ 1.")
    if token_ids.is_cpu and has_values(token_ids):
        for extreme in (token_ids.item(),) if token_ids.numel() == 1 else map(int, token_ids.aminmax()):
            if not 0 <= extreme < vocab_size:
                raise ValueError(f"`{name}` holds {extreme}, but the vocabulary has {vocab_size} tokens, from 0 on.")


def _is_one_id(tensor: Tensor) -> bool:
    """True for (1, 1) int64 in memory of a CPU: all but its value is checked, in a third of the time."""
    return (
        has_memory(tensor)
        and tensor.is_cpu
        and tensor.dtype is torch.int64
        and tensor.shape == (1, 1)
        and tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + 1) * 8
    )


def check_embeddings(name: str, embeddings: Tensor, width: int) -> None:
    """Raise a ValueError unless `embeddings` is real, (B, T, M), with B ≥ 1, T ≥ 1 and M = `width`."""
    check_tensor(name, embeddings)
    shape = tuple(embeddings.shape)
    if len(shape) != 3 or shape[0] < 1 or shape[1] < 1 or shape[2] != width:
        raise ValueError(f"`{name}` has shape {shape}; it must be (B, T, {width}) with B ≥ 1 and T ≥ 1.")
    if not embeddings.is_floating_point():
        raise ValueError(f"`{name}` has type {embeddings.dtype}; it must be a floating-point type.")


def check_mask(name: str, mask: Tensor, batch_size: int, steps: int) -> Tensor:
    """`mask`; raises a ValueError unless it is (B, T)."""
    check_tensor(name, mask)
    if mask.shape != (batch_size, steps):
        raise ValueError(f"`{name}` has shape {tuple(mask.shape)}; the inputs need {(batch_size, steps)}.")
    return mask


def kept_steps(logits_to_keep: int | Tensor) -> slice | Tensor:
    """The index of the steps to keep: the last `logits_to_keep` ones, all for 0, or the indices in a tensor.

    Raises:
        TypeError: it is neither an integer nor a tensor.
        ValueError: it is negative, or the tensor is not a vector of integers.
    """
    if isinstance(logits_to_keep, Tensor):
        check_tensor("logits_to_keep", logits_to_keep)
        wrong = logits_to_keep.dim() != 1 or logits_to_keep.dtype not in _ID_TYPES
    elif not isinstance(logits_to_keep, int):
        raise TypeError(f"`logits_to_keep` is {logits_to_keep!r}; it must be an integer or a vector of indices.")
    else:
        wrong = logits_to_keep < 0
    if wrong:
        raise ValueError(f"`logits_to_keep` is {logits_to_keep}; it must be at least 0, or a vector of indices.")
    return logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
