"""The operators of a block that single steps do not have: recurrences, losses and backward passes; see lowering.py."""

import math

import torch
from torch import Tensor

from .lowering import Lowering, aten, lowers
from .operators import NormStatistic, each_part
from .step_graph import ComplexValue, UnsupportedOp, Value

# ---- Recurrence


@lowers("hf_recurrent.linear_scan.default")
def _scan(t: Lowering, a, b, state, reset, backend):
    operands, is_complex, (steps, width) = _scan_operands(t, reset, a, b, state)
    index = t.graph.index(t.graph.add("scan", (1 + is_complex, steps, width), operands, steps=steps, width=width))
    h = [Value(torch.Size((1, steps, width)), None, part.unsqueeze(0)) for part in index]
    last = [Value(torch.Size((1, width)), None, part[-1:]) for part in index]
    return [ComplexValue(*h), ComplexValue(*last)] if is_complex else [h[0], last[0]]


@lowers("hf_recurrent.linear_scan_backward.default")
def _scan_backward(t: Lowering, a, h, state, reset, grad_h, grad_final, backend):
    operands, is_complex, (steps, width) = _scan_operands(t, reset, a, h, state, grad_h, grad_final)
    size = (2 * steps + 1) * width
    grads = t.graph.add("scan_backward", ((1 + is_complex) * size,), operands, steps=steps, width=width)
    index = t.graph.index(grads).view(-1, size)

    def gradient(begin: int, shape: tuple[int, ...]):
        end = begin + math.prod(shape)
        found = [Value(torch.Size(shape), None, part[begin:end].view(shape)) for part in index]
        return ComplexValue(*found) if is_complex else found[0]

    block = (1, steps, width)
    return [gradient(0, block), gradient(steps * width, block), gradient(2 * steps * width, (1, width))]


def _scan_operands(t: Lowering, reset, *given) -> tuple[list, bool, torch.Size]:
    """The real parts and the imaginary parts, if the first is complex, and resets; with (T, S) of the first."""
    values = [_elements_of(t, x) for x in given]
    is_complex = isinstance(values[0], ComplexValue)
    if any(x is not None and isinstance(x, ComplexValue) != is_complex for x in values):
        raise UnsupportedOp("a recurrence of real and complex numbers")
    parts = [[getattr(x, name, None) for x in values] for name in ("real", "imag")] if is_complex else [values]
    parts += [] if is_complex else [[None] * len(values)]
    shape = parts[0][0].shape[1:]
    return [*parts[0], *parts[1], None if reset is None else t.as_value(reset)], is_complex, shape


def _elements_of(t: Lowering, x):
    if isinstance(x, Tensor) and x.is_complex():
        return ComplexValue(t.as_value(x.real.contiguous()), t.as_value(x.imag.contiguous()))
    return x if x is None or isinstance(x, ComplexValue) else t.as_value(x)


@lowers(aten.native_layer_norm_backward.default)
def _layer_norm_backward(t: Lowering, grad, x, shape, mean, rstd, weight, bias, wanted):
    if not isinstance(rstd, NormStatistic):
        raise UnsupportedOp("the backward pass of an unknown norm")
    width, rank = math.prod(shape), len(x.shape) - len(shape)
    of_weight = of_bias = None
    if wanted[1]:
        normed = t.graph.add("norm", x.shape, [x, None, None], center=True, eps=rstd.eps, width=width)
        of_weight = t.reduce(t.binary("mul", grad, normed), list(range(rank)), False, "sum")
    if wanted[2]:
        of_bias = t.reduce(t.as_value(grad), list(range(rank)), False, "sum")
    if weight is not None:
        grad = t.binary("mul", grad, weight)
    of_x = None
    if wanted[0]:
        count = x.shape.numel() // width
        of_x = t.graph.add("norm_backward", x.shape, [x, grad], eps=rstd.eps, width=width, count=count)
    return [of_x, of_weight, of_bias]


for _packet, _rule in {
    aten.sigmoid_backward: lambda t, grad, y: t.binary("mul", grad, t.binary("mul", y, t.binary("sub", 1, y))),
    aten.tanh_backward: lambda t, grad, y: t.binary("mul", grad, t.binary("sub", 1, t.binary("mul", y, y))),
    aten.threshold_backward: lambda t, grad, x, threshold: t.binary(
        "mul", grad, t.binary("lt", t.filled(x.shape, threshold), x)
    ),
}.items():
    lowers(_packet.default)(_rule)


@lowers(aten.silu_backward.default)
def _silu_backward(t: Lowering, grad, x):
    gate = t.map("sigmoid", x.shape, x)
    slope = t.binary("mul", gate, t.binary("add", t.binary("mul", x, t.binary("sub", 1, gate)), 1))
    return t.binary("mul", grad, slope)


@lowers(aten.softplus_backward.default)
def _softplus_backward(t: Lowering, grad, x, beta, threshold):
    return t.binary("mul", grad, t.map("sigmoid", x.shape, x if beta == 1 else t.binary("mul", x, beta)))


@lowers(aten.gelu_backward.default)
def _gelu_backward(t: Lowering, grad, x, approximate="none"):
    if approximate != "none":
        raise UnsupportedOp("the gradient of an approximate GeLU")
    # Φ(x) = gelu(x) / x, and its Taylor polynomial where the ratio would be 0 / 0.
    near = t.binary("lt", t.map("abs", x.shape, x), 1e-4)
    linear = t.binary("add", t.binary("mul", x, 1 / math.sqrt(2 * math.pi)), 0.5)
    ratio = t.binary("div", t.map("gelu", x.shape, x), t.map("where", x.shape, near, t.filled(x.shape, 1), x))
    cumulative = t.map("where", x.shape, near, linear, ratio)
    square = t.binary("mul", t.binary("mul", x, x), -0.5)
    density = t.binary("mul", t.map("exp", x.shape, square), 1 / math.sqrt(2 * math.pi))
    return t.binary("mul", grad, t.binary("add", cumulative, t.binary("mul", x, density)))


@lowers(aten.bitwise_and.Tensor, aten.logical_and.default)
def _and(t: Lowering, x, y):
    result = t.binary("mul", x, y)
    result.is_bool = True
    return result


# ---- Loss and embedding


@lowers(aten._log_softmax.default)
def _log_softmax(t: Lowering, x, dim, half_to_float=False):
    shifted = t.binary("sub", x, t.reduce(x, dim, True, "maximum"))
    total = t.reduce(t.map("exp", x.shape, shifted), dim, True, "sum")
    return t.binary("sub", shifted, t.map("log", total.shape, total))


@lowers(aten._log_softmax_backward_data.default)
def _log_softmax_backward(t: Lowering, grad, output, dim, dtype=None):
    total = t.reduce(grad, dim, True, "sum")
    return t.binary("sub", grad, t.binary("mul", t.map("exp", output.shape, output), total))


@lowers(aten.nll_loss_forward.default)
def _nll_loss(t: Lowering, x, labels, weight, reduction, ignored):
    _check_loss(weight, reduction, ignored)
    losses = t.graph.add("nll_loss", x.shape[:1], [x, labels], steps=x.shape[0], width=x.shape[1])
    total = t.filled((), 0)  # of the weights; unused without weights
    return [losses if reduction == 0 else t.reduce(losses, None, False, "sum"), total]


@lowers(aten.nll_loss_backward.default)
def _nll_loss_backward(t: Lowering, grad, x, labels, weight, reduction, ignored, total):
    _check_loss(weight, reduction, ignored)
    fields = {"steps": x.shape[0], "width": x.shape[1], "one_grad": int(reduction == 2)}
    return t.graph.add("nll_loss_backward", x.shape, [t.as_value(grad), labels], **fields)


def _check_loss(weight, reduction: int, ignored: int) -> None:
    if weight is not None or reduction not in (0, 2) or ignored >= 0:
        raise UnsupportedOp("a weighted or averaged loss")


@lowers(aten.embedding_dense_backward.default)
def _embedding_backward(t: Lowering, grad, ids, height, padding, scale_by_frequency):
    if scale_by_frequency or padding >= 0:
        raise UnsupportedOp("an embedding with padding")
    width = grad.shape[-1]
    operands, steps = [grad, ids], ids.shape.numel()
    return t.graph.add("lookup_backward", (height, width), operands, steps=steps, height=height, width=width)


# ---- Gradients of views


def _surrounded(t: Lowering, grad: Value, shape, slice_of) -> Value:
    """Zeros of that shape, in which `slice_of` selects the elements of `grad`."""
    zero = t.graph.constant(t.fold(torch.zeros(1, dtype=t.graph.dtype)))
    index = torch.full(tuple(shape), int(t.graph.index(Value(torch.Size((1,)), zero))))
    slice_of(index).copy_(t.graph.index(grad))
    return Value(torch.Size(shape), None, index)


@lowers(aten.select_backward.default)
def _select_backward(t: Lowering, grad, shape, dim, number):
    return each_part(grad, lambda part: _surrounded(t, part, shape, lambda index: index.select(dim, number)))


@lowers(aten.slice_backward.default)
def _slice_backward(t: Lowering, grad, shape, dim, start, end, step):
    def slice_of(index: Tensor) -> Tensor:
        return aten.slice.Tensor(index, dim, start, end, step)

    return each_part(grad, lambda part: _surrounded(t, part, shape, slice_of))
