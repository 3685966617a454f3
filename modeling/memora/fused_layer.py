"""A layer of Memora as one operation, forward and backward, where a kernel for CPUs can: faster, with the same bits.

It computes what `RecurrentLayer` computes with Memora's two blocks and the unit GLRU.
"""

import torch
from torch import Tensor, nn

from ..block.linear_maps import rounds_products
from ..block.recurrent_blocks import Contraction
from ..block.training_kernels import SMALLEST_FUSED, is_plain_layer, layer_module, training_kernels
from ..units.gated_units import GLRU


def fused_layer(layer: nn.Module, hidden: Tensor, inputs) -> tuple[Tensor, Tensor] | None:
    """The output (B, T, M) and the last state (B, S) of a `RecurrentLayer` with Memora's blocks.

    None where its modules have to be called.
    """
    block, mlp, state = layer.recurrent_block, layer.mlp, inputs.state["recurrent"]
    unit, norms = block.recurrent_unit, (layer.recurrent_norm, layer.mlp_norm)
    if not torch.is_grad_enabled() or inputs.padding_mask is not None or type(unit) is not GLRU:
        return None
    kernels = training_kernels(hidden, state, unit.nu, *(norm.weight for norm in norms))
    if kernels is None or not kernels.has_fast_products() or torch.is_autocast_enabled("cpu"):
        return None
    if (layers := layer_module()) is None:
        return None
    narrowest = min(hidden.shape[-1], unit.state_size, len(mlp.up_proj.weight))
    if not layers.supports(*hidden.shape[:2]) or hidden[..., 0].numel() * narrowest < SMALLEST_FUSED:
        return None
    linears = (
        *(unit.recurrence_gate, unit.input_gate, unit.input_projection, block.gate_proj, block.out_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
    if not _is_plain(block, mlp, unit, norms, linears):
        return None
    matrices = [linear.weight for linear in linears]
    if training_kernels(hidden, *matrices) is None:
        return None
    rate = unit.decay_scale * torch.exp(unit.nu)
    weights = layers.LayerWeights(rate, norms[0].weight, *matrices[:5], norms[1].weight, *matrices[5:])
    eps = layers.Epsilons(norms[0].eps, block.eps, norms[1].eps, mlp.eps)
    rounded = rounds_products(hidden, kernels)
    return _FusedLayer.apply(eps, rounded, hidden, state, inputs.reset_mask, *weights)


def _is_plain(block: nn.Module, mlp: nn.Module, unit: GLRU, norms: tuple, linears: tuple) -> bool:
    """True where no part has hooks, biases, other methods, or an option that the kernel does not know."""
    return (
        all(is_plain_layer(linear, nn.Linear, Contraction) and linear.bias is None for linear in linears)
        and all(is_plain_layer(norm, nn.RMSNorm) and None not in (norm.weight, norm.eps) for norm in norms)
        and is_plain_layer(unit, GLRU)
        and not (block.norm_after_contraction or mlp.norm_after_contraction or unit.allow_negative_eigenvalues)
        and not vars(unit).keys() & {"project", "coefficients", "recur", "read_out"}
    )


class _FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, rounded, hidden, state, reset_mask, *weights):
        layers = layer_module()
        output, last, kept = layers.layer(
            hidden, state, reset_mask, layers.LayerWeights(*weights), eps, rounded=rounded
        )
        ctx.eps, ctx.rounded = eps, rounded
        ctx.save_for_backward(hidden, state, reset_mask, kept, *weights)
        ctx.set_materialize_grads(False)
        return output, last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, grad_last):
        hidden, state, reset_mask, kept, *weights = ctx.saved_tensors
        layers = layer_module()
        grad = torch.zeros_like(hidden) if grad is None else grad
        grads = layers.layer_backward(
            *(hidden, state, reset_mask, layers.LayerWeights(*weights), ctx.eps, kept, grad, grad_last),
            wanted=ctx.needs_input_grad[5:],
            rounded=ctx.rounded,
        )
        return None, None, grads.hidden, grads.state, None, *grads.weights
