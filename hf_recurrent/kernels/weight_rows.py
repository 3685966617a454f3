"""Rows of weights in narrow types: int8 with a scale for each row, or bfloat16 in the order that the kernel reads."""

import torch
from torch import Tensor

WEIGHT_TYPES = (None, "bfloat16", "int8")  # enum weights in bytecode.h
_PAIR_BLOCK = 32  # PAIR_BLOCK in step_cpu.c


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values of a weight (outputs, inputs) and their scale (outputs, 1), symmetric."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def largest_code(width: int) -> int:
    """The largest 16-bit integer of activations: so small that sums of `width` products fit in four 32-bit lanes."""
    return min((1 << 33) // (127 * width), 32767)


def pair_columns(weight: Tensor) -> Tensor:
    """bfloat16 values in the order in which the kernel widens them: in each block of 32 columns, 0, 16, 1, 17, …

    The last block is filled with zeros.
    """
    blocks = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, -weight.shape[1] % _PAIR_BLOCK))
    return blocks.unflatten(1, (-1, 2, _PAIR_BLOCK // 2)).transpose(2, 3).flatten(1)
