"""LN( GeLU(LN(gate)) ∘ LN(value) ), the heart of Memora's two blocks (Memora, section 4.2), LN without parameters.

A kernel takes each row once, and keeps six numbers of it. Without one, autograd would keep five tensors of
the inputs' size: where these are large, the backward pass recomputes them, on a CPU in tiles that stay in the cache.
"""

import torch
from torch import Tensor, nn

from ..scan.tiling import should_recompute, tiles
from .recurrent_blocks import layer_norm
from .recurrent_state import state_dtype
from .training_kernels import KernelFunction, layer_kernels

_norm, _norm_backward = torch.ops.aten.native_layer_norm, torch.ops.aten.native_layer_norm_backward
_ONLY_INPUT = [True, False, False]  # of the gradients of a norm: it has no weight and no bias


def gated_norm(gate: Tensor, value: Tensor, eps: float) -> Tensor:
    """LN( GeLU(LN(gate)) ∘ LN(value) ) over the last dimension, (…, width), in the type of `gate`.

    Where it is large its gradients cannot be differentiated again.
    """
    if (kernels := layer_kernels(gate, value)) is not None:
        return _FusedGatedNorm.apply(kernels, "gated_norm", 1, (eps,), gate, value)
    if should_recompute(gate):
        return _GatedNorm.apply(gate, value, eps)
    dtype = state_dtype(gate.dtype)
    opened = nn.functional.gelu(layer_norm(gate.to(dtype), eps))
    return layer_norm(opened * layer_norm(value.to(dtype), eps), eps).to(gate.dtype)


class _FusedGatedNorm(KernelFunction):
    pass


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, value, eps):
        ctx.eps = eps
        ctx.save_for_backward(gate, value)
        output, shape = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device), gate.shape[-1:]
        with torch.autocast(gate.device.type, enabled=False):
            for of_gate, of_value, out in tiles(gate, value, output):
                of_gate, of_value = of_gate.to(state_dtype(gate.dtype)), of_value.to(state_dtype(gate.dtype))
                product = nn.functional.gelu(_norm(of_gate, shape, None, None, eps)[0])
                product.mul_(_norm(of_value, shape, None, None, eps)[0])
                out.copy_(_norm(product, shape, None, None, eps)[0])
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        gate, value = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, value)]
        shape, eps, dtype = gate.shape[-1:], ctx.eps, state_dtype(gate.dtype)
        for of_gate, of_value, grad, grad_gate, grad_value in tiles(gate, value, grad_output, *grads):
            of_gate, of_value, grad = (x.to(dtype) for x in (of_gate, of_value, grad))
            normed_gate, *gate_moments = _norm(of_gate, shape, None, None, eps)
            normed_value, *value_moments = _norm(of_value, shape, None, None, eps)
            opened = nn.functional.gelu(normed_gate)
            product = opened * normed_value
            _, *moments = _norm(product, shape, None, None, eps)
            grad = _norm_backward(grad, product, shape, *moments, None, None, _ONLY_INPUT)[0]
            of_norm = opened.mul_(grad)
            grad_value.copy_(_norm_backward(of_norm, of_value, shape, *value_moments, None, None, _ONLY_INPUT)[0])
            of_norm = torch.ops.aten.gelu_backward(grad.mul_(normed_value), normed_gate)
            grad_gate.copy_(_norm_backward(of_norm, of_gate, shape, *gate_moments, None, None, _ONLY_INPUT)[0])
        return *grads, None
