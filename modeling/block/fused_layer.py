"""A whole layer as one operation, forward and backward, where a kernel for CPUs can: faster, with the same bits.

It computes what `RecurrentLayer` computes with a family's blocks and its own unit.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .linear_maps import rounds_products
from .recurrent_blocks import Contraction
from .training_kernels import SMALLEST_FUSED, is_plain_layer, kernel_module, training_kernels, training_module


class LayerParts(NamedTuple):
    """Modules and vectors of a layer.

    Args:
        states: of the streams, in the order of the kernel.
        modules: the recurrent unit, then other modules than linear maps and norms, of classes that the kernel knows.
        norms: before the recurrent block, and before the MLP.
        maps: all linear maps; their outputs and inputs are widths of the layer.
        vectors: parameters of the unit and of the convolution.
    """

    states: tuple[Tensor, ...]
    modules: tuple[nn.Module, ...]
    norms: tuple[nn.Module, nn.Module]
    maps: tuple[nn.Module, ...]
    vectors: tuple[Tensor, ...]


def layer_kernel(family: str, hidden: Tensor, inputs, parts: LayerParts) -> ModuleType | None:
    """The kernel of a family's layer, or None where the layer's modules have to be called.

    Args:
        family: the module of `hf_recurrent.kernels` with its layer.
        hidden: (B, T, M).
        inputs: `LayerInputs`.
    """
    if inputs.padding_mask is not None:
        return None
    vectors = (*parts.vectors, *(norm.weight for norm in parts.norms))
    kernels = training_kernels(hidden, *parts.states, *vectors)
    if kernels is None or not kernels.has_fast_products() or torch.is_autocast_enabled("cpu"):
        return None
    if not _has_plain_parts(parts):
        return None
    weight_bytes = sum(linear.weight.nbytes for linear in parts.maps)
    if (layers := kernel_module("layer_cpu")) is None or not layers.supports(*hidden.shape[:2], weight_bytes):
        return None
    narrowest = min(min(linear.weight.shape) for linear in parts.maps)
    if hidden[..., 0].numel() * narrowest < SMALLEST_FUSED:
        return None
    if training_kernels(hidden, *(linear.weight for linear in parts.maps)) is None:
        return None
    return kernel_module(family)


def _has_plain_parts(parts: LayerParts) -> bool:
    """True where no part has hooks, biases, other methods, or an option that the kernel does not know."""
    unit = parts.modules[0]
    return (
        all(is_plain_layer(linear, nn.Linear, Contraction) and linear.bias is None for linear in parts.maps)
        and all(is_plain_layer(norm, nn.RMSNorm) and None not in (norm.weight, norm.eps) for norm in parts.norms)
        and all(is_plain_layer(module, type(module)) for module in parts.modules)
        and not unit.allow_negative_eigenvalues
        and not vars(unit).keys() & {"project", "coefficients", "recur", "read_out"}
    )


def run_layer_kernel(
    family: ModuleType,
    hidden: Tensor,
    reset_mask: Tensor | None,
    states: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    eps: tuple[float, ...],
) -> tuple[Tensor, ...]:
    """The output (B, T, M), and what the kernel gives for each of the states.

    Args:
        family: of [`layer_kernel`].
        weights, eps: the fields of its `Weights` and `Epsilons`.
    """
    rounded = rounds_products(hidden, training_module())
    options = family.Epsilons(*eps), rounded, torch.is_grad_enabled()
    return FusedLayer.apply(family, *options, hidden, reset_mask, *states, *weights)


class FusedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, family, eps, rounded, keeps, hidden, reset_mask, *tensors):
        count = len(family.KIND.states)
        states, weights = tensors[:count], family.Weights(*tensors[count:])
        result = kernel_module("layer_cpu").layer(
            family.KIND, hidden, states, reset_mask, weights, eps, rounded=rounded, keeps=keeps
        )
        if keeps:
            ctx.family, ctx.eps, ctx.rounded = family, eps, rounded
            ctx.save_for_backward(hidden, reset_mask, result.kept, *tensors)
            ctx.set_materialize_grads(False)
        return result.output, *result.last

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *grad_last):
        hidden, reset_mask, kept, *tensors = ctx.saved_tensors
        family, count = ctx.family, len(grad_last)
        states, weights = tensors[:count], family.Weights(*tensors[count:])
        grad = torch.zeros_like(hidden) if grad is None else grad
        grads = kernel_module("layer_cpu").layer_backward(
            *(family.KIND, hidden, states, reset_mask, weights, ctx.eps, kept, grad, grad_last),
            wanted=ctx.needs_input_grad[6 + count :],
            rounded=ctx.rounded,
        )
        return None, None, None, None, grads.hidden, None, *grads.states, *grads.weights
