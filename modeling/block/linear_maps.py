"""Linear maps of one input, computed together: on a CPU one call instead of one for each map and gradient.

Shape letters: I inputs of a linear map. `rows` are all other dimensions of the input together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
from torch import Tensor, nn

from .recurrent_blocks import Contraction
from .training_kernels import is_plain_layer, run_hooks, training_kernels, training_module

_rounds = ContextVar("rounded_products", default=False)


@contextmanager
def rounded_products(on: bool = True) -> Iterator[None]:
    """Inside the block, the inputs of the products of linear maps, and of their gradients, are rounded to bfloat16.

    Only for float32, on a CPU that multiplies bfloat16 numbers faster (AVX512-BF16, not of Intel). Sums, results, and
    all else stay float32.
    """
    token = _rounds.set(on)
    try:
        yield
    finally:
        _rounds.reset(token)


def rounds_products(inputs: Tensor, kernels: ModuleType) -> bool:
    """True inside [`rounded_products`], where the products of these inputs are to be rounded."""
    return _rounds.get() and inputs.dtype is torch.float32 and kernels.has_fast_bf16_products()


def linear_maps(inputs: Tensor, *maps: nn.Module) -> tuple[Tensor, ...]:
    """`map(inputs)` of each of the maps, for inputs (…, I).

    `nn.Linear`s may have forward hooks; other modules, such as adapters, are called one by one.
    """
    if all(is_plain_layer(linear, nn.Linear, Contraction, with_hooks=True) for linear in maps):
        parameters = [parameter for linear in maps for parameter in (linear.weight, linear.bias)]
        kernels = training_kernels(inputs, *parameters)
        if kernels is not None and kernels.has_fast_products() and not torch.is_autocast_enabled("cpu"):
            outputs = _LinearMaps.apply(rounds_products(inputs, kernels), inputs, *parameters)
            return tuple(run_hooks(linear, inputs, output) for linear, output in zip(maps, outputs, strict=True))
    return tuple(linear(inputs) for linear in maps)


def linear_map(linear: nn.Module, inputs: Tensor) -> Tensor:
    """`linear(inputs)`, as [`linear_maps`] of one map."""
    return linear_maps(inputs, linear)[0]


class _LinearMaps(torch.autograd.Function):
    """Arguments: whether products round to bfloat16, inputs, then weight and bias, which may be None, of each map."""

    @staticmethod
    def forward(ctx, rounded, inputs, *parameters):
        kernels, rows = training_module(), inputs.reshape(-1, inputs.shape[-1])
        outputs, products = [], []
        for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
            output = kernels.empty(torch.Size((*inputs.shape[:-1], len(weight))), inputs.dtype)
            if bias is not None:
                output.copy_(bias)
            products.append((rows, weight.T, output.view(len(rows), -1), bias is not None))
            outputs.append(output)
        kernels.multiply(products, rounded=rounded)
        ctx.rounded = rounded
        ctx.save_for_backward(inputs, *parameters[::2])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        inputs, *weights = ctx.saved_tensors
        kernels = training_module()
        _, needs_inputs, *needs = ctx.needs_input_grad
        results = [None] * (1 + len(needs))
        given = [
            (i, w, g.reshape(-1, len(w))) for i, (w, g) in enumerate(zip(weights, grads, strict=True)) if g is not None
        ]
        products, rows = [], inputs.reshape(-1, inputs.shape[-1])
        if needs_inputs and given:
            results[0] = kernels.empty(inputs.shape, inputs.dtype)
            of_rows = results[0].view(rows.shape)
            products += [(grad, weight, of_rows, number > 0) for number, (_, weight, grad) in enumerate(given)]
        for i, weight, grad in given:
            if needs[2 * i]:
                results[1 + 2 * i] = kernels.empty(weight.shape, weight.dtype)
                products.append((grad.T, rows, results[1 + 2 * i], False))
            if needs[2 * i + 1]:
                results[2 + 2 * i] = grad.sum(0)
        if products:
            kernels.multiply(products, rounded=ctx.rounded)
        return None, *results
