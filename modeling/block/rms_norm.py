"""RMSNorm in one pass over memory, forward and backward, where a kernel can."""

import torch
from torch import nn

from .training_kernels import is_plain_layer, layer_kernels


def rms_norm(norm: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """`norm(hidden)` for an `nn.RMSNorm` over the last dimension; other modules are called.

    A kernel on a GPU rounds to autocast's type, as the products that follow would.
    """
    is_simple = is_plain_layer(norm, nn.RMSNorm) and len(norm.normalized_shape) == 1 and norm.eps is not None
    if is_simple and (kernels := layer_kernels(hidden, norm.weight)) is not None:
        return _RmsNorm.apply(kernels, hidden, norm.weight, norm.eps)
    return norm(hidden)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, hidden, weight, eps):
        output, scales = kernels.rms_norm(hidden, weight, eps)
        ctx.kernels, ctx.eps = kernels, eps
        ctx.save_for_backward(hidden, weight, scales)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, scales = ctx.saved_tensors
        return None, *ctx.kernels.rms_norm_backward(hidden, weight, scales, grad, ctx.eps), None
