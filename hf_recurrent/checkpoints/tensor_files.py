"""safetensors files, written and read tensor by tensor, so that no process holds all of them in memory.

The format (https://github.com/huggingface/safetensors): the length of the header as 8 bytes, the header as JSON, the
values of all tensors one after another. The package `safetensors` writes it from a dictionary of whole tensors only.

Tensors of which every process holds a part (`DTensor`, as FSDP2 makes them) are read and written as whole ones. A
function that gathers must be called by all processes at the same point, with the same tensors in the same order;
tensors that are not sharded pass through.
"""

import json
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: object) -> bool:
    """True if every process holds a part of `tensor`."""
    return isinstance(tensor, DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, detached; gathered in every process if it is sharded."""
    tensor = tensor.detach()
    if not is_sharded(tensor):
        return tensor
    # Shards that are kept in the memory of the CPU travel by way of their GPU.
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


def own_part(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`value`, which every process has, as a tensor on the device of `like` and sharded like it; no communication."""
    if not is_sharded(like):
        return value.to(like.device)
    # A row of the values on the mesh's device at most: the others are cut away before they travel.
    part = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return part.to(like.device)


@torch.no_grad()
def copy_whole(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value`, which every process has, into `target`, of which it may have a part only."""
    target.copy_(own_part(value.to(target.dtype), target))


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no value is NaN or infinite, in any process."""
    tensor = tensor.detach()
    tensor = tensor.coalesce().values() if tensor.is_sparse else tensor
    if not is_sharded(tensor):
        # A sum is faster than looking at each number, and not finite if one of them is not; but it may overflow.
        return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
    finite = torch.isfinite(tensor.to_local()).all().to(tensor.device_mesh.device_type, torch.int32)
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite)


_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_ALIGNMENT = 8  # of the header, in bytes


def write_tensors(
    tensors: Mapping[str, torch.Tensor], path: str | os.PathLike | None, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file tensor by tensor; raise a TypeError if safetensors has no such type.

    Args:
        tensors: by name, on any device; of sharded ones, all processes give their parts at the same time.
        path: None in a process that only takes part in gathering sharded tensors.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    # Wide types first, so that every tensor is aligned to its type.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TypeError(f"A checkpoint cannot hold `{name}` of type {tensor.dtype}.")
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    if path is None:
        for name in names:
            whole(tensors[name])
        return
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            values = whole(tensors[name]).cpu().contiguous().reshape(-1)
            if values.stride() != (1,):  # one value, expanded
                values = values.clone(memory_format=torch.contiguous_format)
            file.write(values.view(torch.uint8).numpy().data)


def open_tensors(path: str | os.PathLike) -> safe_open:
    """Open a safetensors file of a checkpoint; raise a ValueError if it is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"The checkpoint file `{os.fspath(path)}` is missing or damaged: {error}.") from error
