"""GeLU(gate) ∘ value, the heart of Hawk's two blocks (De et al. 2024, section 2), in one pass over memory."""

import torch
from torch import nn

from .training_kernels import layer_kernels


def gated_gelu(gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """GeLU(gate) ∘ value, element by element, of one shape and type."""
    if gate.shape == value.shape and (kernels := layer_kernels(gate, value)) is not None:
        return _GatedGelu.apply(kernels, gate, value)
    return nn.functional.gelu(gate) * value


class _GatedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, gate, value):
        ctx.kernels = kernels
        ctx.save_for_backward(gate, value)
        return kernels.gated_gelu(gate, value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        gate, value = ctx.saved_tensors
        return None, *ctx.kernels.gated_gelu_backward(gate, value, grad)
