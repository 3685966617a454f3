"""A layer of Memora as one operation, forward and backward, where a kernel for CPUs can: faster, with the same bits.

It computes what `RecurrentLayer` computes with Memora's two blocks and the unit GLRU.
"""

from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn

from ..block.linear_maps import rounds_products
from ..block.recurrent_blocks import Contraction
from ..block.training_kernels import SMALLEST_FUSED, is_plain_layer, layer_module, training_kernels
from ..units.gated_units import GLRU

# From the tables of the modules themselves: `nn.Module` looks in two others before it.
_parts = itemgetter("recurrent_norm", "recurrent_block", "mlp_norm", "mlp")
_unit_maps = itemgetter("recurrence_gate", "input_gate", "input_projection")
_block_parts = itemgetter("recurrent_unit", "gate_proj", "out_proj")
_mlp_maps = itemgetter("gate_proj", "up_proj", "down_proj")
_METHODS = {"project", "coefficients", "recur", "read_out"}


def fused_layer(layer: nn.Module, hidden: torch.Tensor, inputs) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The output (B, T, M) and the last state (B, S) of a layer, or None where its modules have to be called.

    Args:
        layer: a `RecurrentLayer` with Memora's blocks.
        hidden: (B, T, M).
        inputs: `LayerInputs`.
    """
    if not torch.is_grad_enabled() or inputs.padding_mask is not None or (layers := layer_module()) is None:
        return None
    norm, block, mlp_norm, mlp = _parts(layer._modules)
    unit, gate, out = _block_parts(block._modules)
    if type(unit) is not GLRU:
        return None
    linears = (*_unit_maps(unit._modules), gate, out, *_mlp_maps(mlp._modules))
    if not _is_plain(block, mlp, unit, (norm, mlp_norm), linears):
        return None
    matrices = [linear._parameters["weight"] for linear in linears]
    state, vectors = inputs.state["recurrent"], (unit._parameters["nu"], norm.weight, mlp_norm.weight)
    kernels = training_kernels(hidden, state, *vectors, *matrices)
    if kernels is None or not kernels.has_fast_products() or torch.is_autocast_enabled("cpu"):
        return None
    streams, steps, width = hidden.shape
    narrowest = min(width, *matrices[0].shape, len(matrices[6]))
    if not layers.supports(streams, steps) or streams * steps * narrowest < SMALLEST_FUSED:
        return None
    eps = layers.Epsilons(norm.eps, block.eps, mlp_norm.eps, mlp.eps)
    options = _Options(eps, rounds_products(hidden, kernels), unit.decay_scale)
    nu, of_norm, of_mlp_norm = vectors
    weights = layers.LayerWeights(nu, of_norm, *matrices[:5], of_mlp_norm, *matrices[5:])
    return _FusedLayer.apply(options, hidden, state, inputs.reset_mask, *weights)


class _Options(NamedTuple):
    eps: tuple[float, ...]
    rounded: bool
    decay_scale: float


def _is_plain(block: nn.Module, mlp: nn.Module, unit: GLRU, norms: tuple, linears: tuple) -> bool:
    """True where no part has hooks, biases, other methods, or an option that the kernel does not know."""
    for linear in linears:
        if not is_plain_layer(linear, nn.Linear, Contraction) or linear._parameters["bias"] is not None:
            return False
    for norm in norms:
        if not is_plain_layer(norm, nn.RMSNorm) or norm.weight is None or norm.eps is None:
            return False
    return (
        is_plain_layer(unit, GLRU)
        and not (block.norm_after_contraction or mlp.norm_after_contraction or unit.allow_negative_eigenvalues)
        and not vars(unit).keys() & _METHODS
    )


class _FusedLayer(torch.autograd.Function):
    """Weights are those of `LayerWeights`, with the unit's ν in place of the rate."""

    @staticmethod
    def forward(ctx, options, hidden, state, reset_mask, nu, *weights):
        layers = layer_module()
        exponential = nu.exp()
        rate = options.decay_scale * exponential
        given = layers.LayerWeights(rate, *weights)
        output, last, kept = layers.layer(hidden, state, reset_mask, given, options.eps, rounded=options.rounded)
        ctx.options = options
        ctx.save_for_backward(hidden, state, reset_mask, kept, exponential, *given)
        ctx.set_materialize_grads(False)
        return output, last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_last):
        hidden, state, reset_mask, kept, exponential, *weights = ctx.saved_tensors
        layers, options = layer_module(), ctx.options
        grad = torch.zeros_like(hidden) if grad is None else grad
        grads = layers.layer_backward(
            *(hidden, state, reset_mask, layers.LayerWeights(*weights), options.eps, kept, grad, grad_last),
            wanted=ctx.needs_input_grad[4:],
            rounded=options.rounded,
        )
        of_rate, *of_weights = grads.weights
        of_nu = None if of_rate is None else of_rate * options.decay_scale * exponential
        return None, grads.hidden, grads.state, None, of_nu, *of_weights
