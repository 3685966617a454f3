"""Tiling: tensors in slices that stay in a CPU's cache from the first operation to the last."""

from collections.abc import Iterator

from torch import Tensor

from ..block.tensor_checks import is_traced

# Elements of a tile. Half a dozen tensors are in use at a time; smaller tiles cost more calls than cache misses.
CPU_TILE_ELEMENTS = 1 << 17
# Intermediate results up to this size are kept: they take little memory, and each function call costs time.
RECOMPUTED_ELEMENTS = 1 << 19


def tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape (…, width), cut alike: views (n, width) where they are contiguous.

    Small tensors and tensors on other devices are not cut.
    """
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= CPU_TILE_ELEMENTS:
        yield tensors
        return
    size = max(1, CPU_TILE_ELEMENTS // first.shape[-1])
    yield from zip(*(tensor.reshape(-1, tensor.shape[-1]).split(size) for tensor in tensors), strict=True)


def should_recompute(tensor: Tensor) -> bool:
    """True where a hand-written backward pass that recomputes intermediate results is better than autograd's."""
    return not is_traced() and tensor.numel() > RECOMPUTED_ELEMENTS
