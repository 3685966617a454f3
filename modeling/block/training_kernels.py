"""Kernels of the `hf_recurrent` package for the parts of a layer, where they can replace plain torch."""

import importlib
from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .tensor_checks import PLAIN_TENSORS, is_traced

# Smaller tensors stay with torch: its gradients can be differentiated again, and calls cost more than memory.
SMALLEST_FUSED = 1 << 13


@cache
def kernel_module(name: str) -> ModuleType | None:
    """A module of `hf_recurrent.kernels`; None where it is not installed or was not compiled."""
    try:
        return importlib.import_module(f"hf_recurrent.kernels.{name}")
    except ImportError:  # a checkpoint's own code without the package, or without a C compiler or Triton
        return None


def training_module() -> ModuleType | None:
    """The kernels for a CPU; None where they are not installed or were not compiled."""
    return kernel_module("training_cpu")


def layer_kernels(*tensors: Tensor | None) -> ModuleType | None:
    """The kernels of a layer's norms and gates, on a CPU or a GPU, as [`training_kernels`].

    On a GPU tensors may have different floating types, and the first may be small where no gradient is wanted.
    """
    first = tensors[0]
    if first.device.type != "cuda":
        return training_kernels(*tensors)
    if is_traced() or torch._C._len_torch_dispatch_stack():
        return None
    if (torch.is_grad_enabled() and first.numel() < SMALLEST_FUSED) or first.numel() == 0:
        return None
    if (kernels := kernel_module("training_triton")) is None or not kernels.supports_width(first.shape[-1]):
        return None
    there = [tensor for tensor in tensors if tensor is not None]
    alike = all(type(t) in PLAIN_TENSORS and t.device == first.device and kernels.supports(t.dtype) for t in there)
    return kernels if alike else None


def training_kernels(*tensors: Tensor | None) -> ModuleType | None:
    """The kernels for a CPU, if they can compute with these tensors; else None, and plain torch has to.

    They need tensors on the CPU, of one type, float32 or float64, of which the first is large. They are invisible to
    compilers, recordings and torch.func, which therefore get plain torch. Where kernels are simulated, to count their
    memory, tensors may be fake.
    """
    first = tensors[0]
    if is_traced() or first.device.type != "cpu" or first.numel() < SMALLEST_FUSED:
        return None
    if (kernels := training_module()) is None or not kernels.supports(first.dtype):
        return None
    types = PLAIN_TENSORS
    if torch._C._len_torch_dispatch_stack():
        if not kernels.is_simulated():
            return None
        types = (*types, FakeTensor)
    alike = all(t is None or (type(t) in types and t.is_cpu and t.dtype is first.dtype) for t in tensors)
    return kernels if alike else None


class KernelFunction(torch.autograd.Function):
    """The kernel NAME with its backward pass NAME_backward. Each has a subclass, which profiles show.

    Arguments: the kernels, NAME, how many results are outputs (the backward pass gets the others), the arguments after
    the tensors, and the tensors, of which the first ones have gradients.
    """

    @staticmethod
    def forward(ctx, kernels, name, outputs, options, *tensors):
        results = getattr(kernels, name)(*tensors, *options)
        results = results if isinstance(results, tuple) else (results,)
        ctx.kernel, ctx.options, ctx.count = getattr(kernels, f"{name}_backward"), options, len(tensors)
        ctx.save_for_backward(*tensors, *results[outputs:])
        return results[:outputs] if outputs > 1 else results[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        found = ctx.kernel(*ctx.saved_tensors, *grads, *ctx.options)
        return None, None, None, None, *found, *[None] * (ctx.count - len(found))


def is_plain_layer(module: nn.Module, *types: type[nn.Module], with_hooks: bool = False) -> bool:
    """True for a module of one of these types itself, whose call does nothing but its `forward`.

    With `with_hooks`, it may have forward hooks too, which [`run_hooks`] runs.
    """
    hooks = {} if with_hooks and not module._forward_hooks_with_kwargs else module._forward_hooks
    return (
        type(module) in types
        and not (hooks or module._forward_pre_hooks or module._backward_hooks)
        and not (module._backward_pre_hooks or "forward" in vars(module))
    )


def run_hooks(module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
    """The output after the module's forward hooks, as if it had been called."""
    for hook in module._forward_hooks.values():
        result = hook(module, (inputs,), output)
        output = output if result is None else result
    return output
