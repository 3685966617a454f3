"""Tensors of which every process holds a part (`DTensor`, as FSDP2 makes them), read and written as whole ones.

A function here that gathers has to be called by all processes at the same point, with the same tensors in the same
order. Tensors that are not sharded pass through, so that callers need not know how a run is distributed.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(tensor: object) -> bool:
    """True if every process holds a part of `tensor`."""
    return isinstance(tensor, DTensor)


def any_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    """True if every process holds a part of some of the tensors."""
    return any(map(is_sharded, tensors))


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
