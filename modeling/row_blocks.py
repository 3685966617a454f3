"""Going through tensors in blocks of rows that stay in a CPU's cache from the first operation to the last."""

from collections.abc import Iterator

import torch

# Elements of a block. Half a dozen tensors are at work at a time; smaller blocks cost more calls than cache misses.
CPU_BLOCK_ELEMENTS = 1 << 17
# Up to so many elements intermediate results are kept: they take little memory, and calls of functions all the time.
RECOMPUTED_ELEMENTS = 1 << 19


def row_blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Tensors of one shape (…, width), cut alike: views of (rows, width) where they are contiguous.

    Elsewhere than on a CPU, or where they are small, they come as they are, in one piece.
    """
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() <= CPU_BLOCK_ELEMENTS:
        yield tensors
        return
    rows = max(1, CPU_BLOCK_ELEMENTS // first.shape[-1])
    yield from zip(*(tensor.reshape(-1, tensor.shape[-1]).split(rows) for tensor in tensors), strict=True)


def recomputing_pays(tensor: torch.Tensor) -> bool:
    """Whether a backward pass by hand, which computes intermediate results again, is better than autograd's.

    Never for a compiler and torch.func, which want plain operations.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return tensor.numel() > RECOMPUTED_ELEMENTS
