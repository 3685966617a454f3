"""Decay and scaled input of a gated linear recurrent unit, without the many passes over memory in between.

A kernel takes one pass forward and one backward. Without one, autograd would keep eight tensors of the size
of all steps' states: where these are large, a hand-written backward pass recomputes them from the projections, on a
CPU in tiles that stay in the cache.
"""

import torch
from torch import Tensor

from ..block.recurrent_state import state_dtype
from ..block.training_kernels import KernelFunction, layer_kernels, training_module
from ..scan.tiling import should_recompute, tiles
from .recurrent_unit import SMALLEST_SQUARED_GAMMA, input_normalizer


def gate_coefficients(
    recurrence_gate: Tensor, rate: Tensor, input_gate: Tensor, inputs: Tensor, *, sigmoid_gate: bool = False
) -> tuple[Tensor, Tensor]:
    """r = exp(-rate ∘ σ(recurrence_gate)) and sqrt(1 - r²) ∘ input_gate ∘ inputs, (…, S) each, float32 or float64.

    Gates and inputs are (…, S), of any floating types; rates (S,), or of a shape that broadcasts, float32 or wider.
    With `sigmoid_gate`, σ(input_gate) takes the place of the input gate. Gradients of large tensors are not
    differentiable.
    """
    # A kernel takes rates (S,), and on a CPU a rate for each row, as where gradients of streams are separate.
    is_known = rate.dim() == 1 or (rate.device.type == "cpu" and rate.shape == recurrence_gate.shape)
    kernels = layer_kernels(recurrence_gate, rate, input_gate, inputs) if is_known else None
    dtype, options = state_dtype(recurrence_gate.dtype), ()
    if sigmoid_gate and kernels is not None and kernels is training_module():
        options = (True,)
    elif sigmoid_gate:
        input_gate = torch.sigmoid(input_gate.to(dtype))
    given = (recurrence_gate, rate, input_gate, inputs)
    if kernels is not None:
        return _FusedGateCoefficients.apply(kernels, "gate_coefficients", 2, options, *given)
    if should_recompute(recurrence_gate):
        return _GateCoefficients.apply(*given)
    log_decay = -rate * torch.sigmoid(recurrence_gate.to(dtype))
    return torch.exp(log_decay), input_normalizer(log_decay) * input_gate.to(dtype) * inputs.to(dtype)


class _FusedGateCoefficients(KernelFunction):
    pass


class _GateCoefficients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, recurrence_gate, rate, input_gate, inputs):
        shape, dtype = recurrence_gate.shape, state_dtype(recurrence_gate.dtype)
        decay, scaled = (torch.empty(shape, dtype=dtype, device=rate.device) for _ in range(2))
        for z, g, u, a, b in _tiles(rate, recurrence_gate, input_gate, inputs, decay, scaled):
            log_decay = torch.sigmoid(z.to(dtype)).mul_(rate).neg_()
            torch.exp(log_decay, out=a)
            normalizer = _squared_normalizer(log_decay).clamp_(min=SMALLEST_SQUARED_GAMMA).sqrt_()
            torch.mul(normalizer, g, out=b).mul_(u)
        ctx.save_for_backward(recurrence_gate, rate, input_gate, inputs, decay)
        return decay, scaled

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_decay, grad_scaled):
        recurrence_gate, rate, input_gate, inputs, decay = ctx.saved_tensors
        given = (recurrence_gate, input_gate, inputs)
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]
        grad_rate = torch.zeros_like(rate)
        for z, g, u, a, da, db, dz, dg, du in _tiles(rate, *given, decay, grad_decay, grad_scaled, *grads):
            gate = torch.sigmoid(z.to(a.dtype))
            squared = _squared_normalizer(torch.mul(gate, rate).neg_())
            clamped = squared < SMALLEST_SQUARED_GAMMA
            normalizer = squared.clamp_(min=SMALLEST_SQUARED_GAMMA).sqrt_()
            through_input = torch.mul(db, normalizer)
            dg.copy_(torch.mul(through_input, u))
            du.copy_(through_input.mul_(g))
            # dγ / d log r = -r² / γ
            of_normalizer = torch.mul(db, g).mul_(u).mul_(a).div_(normalizer).masked_fill_(clamped, 0)
            of_log_decay = torch.sub(da, of_normalizer, out=of_normalizer).mul_(a).mul_(gate)
            grad_rate -= of_log_decay.sum_to_size(rate.shape)
            dz.copy_(of_log_decay.mul_(rate).mul_(gate.sub_(1)))
        return grads[0], grad_rate, *grads[1:]


def _squared_normalizer(log_decay: Tensor) -> Tensor:
    """1 - r² from log r, in place and exact where r → 1."""
    return log_decay.mul_(2).expm1_().neg_()


def _tiles(rate: Tensor, *tensors: Tensor):
    """Tiles where every position has the same rate; else the tensors uncut."""
    return tiles(*tensors) if rate.dim() == 1 else (tensors,)
