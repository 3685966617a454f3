"""The operations of a backward pass, of weights that change, and of whole blocks, as nodes of a graph."""

import math
from typing import Any

import torch
from torch import Tensor

from .step_graph import Buffer, ComplexValue, Untranslatable, Value
from .step_operations import HANDLERS as STEP_HANDLERS
from .step_operations import Handler, Translator

aten = torch.ops.aten
HANDLERS: dict[Any, Handler] = dict(STEP_HANDLERS)


def handler(*operations: Any):
    """Register a function for operations."""

    def register(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(operations, function))
        return function

    return register


class Transposed(Value):
    """The transpose of a matrix, which products read where it is."""

    def __init__(self, of: Value, index_of: Any):
        self.of, self._index_of, self._index = of, index_of, None
        super().__init__(torch.Size(reversed(of.shape)), is_bool=of.is_bool)

    @property
    def index(self) -> Tensor | None:
        if self._index is None and self.buffer is None:
            self._index = self._index_of(self.of).t()
        return self._index

    @index.setter
    def index(self, index: Tensor | None) -> None:
        self._index = index


class NormStatistic(Value):
    """Mean or standard deviation of a norm: known to its backward pass only, which computes it again."""

    def __init__(self, shape: torch.Size, eps: float):
        super().__init__(shape)
        self.eps = eps


class BlockTranslator(Translator):
    """Builds the graph of one block of one stream."""

    def broadcast(self, x: Any, shape: torch.Size) -> Any:
        if isinstance(x, Value) and 1 < x.shape.numel() < shape.numel():
            own = (1,) * (len(shape) - len(x.shape)) + tuple(x.shape)
            spread = [d for d, size in enumerate(shape) if own[d] != size]
            first, last = spread[0], spread[-1]
            if all(shape[d] == 1 or d in spread for d in range(first, last)):
                outer, inner = math.prod(shape[:first]), math.prod(shape[last + 1 :])
                count = shape.numel() // (outer * inner)
                return self.graph.add("broadcast", shape, [x], outer=outer, count=count, inner=inner)
        return super().broadcast(x, shape)

    def as_value(self, x: Any) -> Value:
        """A value or a constant tensor, with its numbers in a buffer."""
        if isinstance(x, Value):
            return x
        buffer, _ = self.constant(x)
        return Value(x.shape, buffer)

    def transposed(self, x: Value) -> Value:
        if isinstance(x, Transposed):
            return x.of
        return Transposed(x, self.graph.index)

    def matmul(self, x: Any, y: Any) -> Value:
        """x (rows, depth) · y (depth, width), each as it is or transposed."""
        (a, a_row, a_depth), (b, b_depth, b_width) = self._matrix(x), self._matrix(y)
        if b_width != 1 and a_depth != 1:
            b, b_depth, b_width = self.graph.vector(y), y.shape[1], 1
        fields = {"rows": x.shape[0], "depth": x.shape[1], "width": y.shape[1]}
        fields |= {"a_row": a_row, "a_depth": a_depth, "b_depth": b_depth, "b_width": b_width}
        return self.graph.add("matmul", (x.shape[0], y.shape[1]), [a, b], **fields)

    def _matrix(self, x: Any) -> tuple[tuple[Buffer, int], int, int]:
        """Its place, and the distances between its rows and between its columns."""
        if isinstance(x, Transposed):
            return self.graph.vector(x.of), 1, x.shape[0]
        return self.graph.vector(self.as_value(x)), x.shape[1], 1


# ---- Products


@handler(aten.mm.default)
def _mm(t: BlockTranslator, x, y):
    return t.matmul(x, y)


@handler(aten.addmm.default)
def _addmm(t: BlockTranslator, bias, x, y, beta=1, alpha=1):
    if alpha != 1 or beta != 1:
        raise Untranslatable("addmm with factors")
    return t.binary("add", t.matmul(x, y), bias)


@handler(aten.bmm.default)
def _bmm(t: BlockTranslator, x, y):
    if x.shape[0] != 1:
        raise Untranslatable("bmm of several matrices")
    product = t.matmul(*(_without_batch(t, matrix) for matrix in (x, y)))
    return Value(torch.Size((1, *product.shape)), product.buffer)


def _without_batch(t: BlockTranslator, x) -> Value:
    x = t.as_value(x)
    return Value(torch.Size(x.shape[1:]), x.buffer, None if x.index is None else x.index.squeeze(0))


@handler(aten.cumsum.default)
def _cumsum(t: BlockTranslator, x, dim, dtype=None):
    steps = x.shape[dim]
    if steps != x.shape.numel():
        raise Untranslatable("cumsum of several rows")
    row = t.graph.move(torch.reshape, [x], t.graph.index(x), (1, steps))
    below = torch.ones(steps, steps, dtype=t.graph.dtype).triu()
    return Value(x.shape, t.matmul(row, below).buffer)


# ---- Recurrence


@handler(torch.ops.hf_recurrent.linear_scan.default)
def _scan(t: BlockTranslator, a, b, state, reset, backend):
    a, b, state = (_number(t, x) for x in (a, b, state))
    is_complex = isinstance(a, ComplexValue)
    steps, width = _real(a).shape[1:]
    parts = [part for name in ("real", "imag")[: 1 + is_complex] for part in (_part(x, name) for x in (a, b, state))]
    operands = [*parts, *[None] * (0 if is_complex else 3), None if reset is None else t.as_value(reset)]
    scanned = t.graph.add("scan", (1 + is_complex, steps, width), operands, steps=steps, width=width)
    index = t.graph.index(scanned)
    h = [Value(torch.Size((1, steps, width)), None, part.unsqueeze(0)) for part in index]
    last = [Value(torch.Size((1, width)), None, part[-1:]) for part in index]
    return [ComplexValue(*h), ComplexValue(*last)] if is_complex else [h[0], last[0]]


@handler(torch.ops.hf_recurrent.linear_scan_backward.default)
def _scan_backward(t: BlockTranslator, a, h, state, reset, grad_h, grad_final, backend):
    given = [None if x is None else _number(t, x) for x in (a, h, state, grad_h, grad_final)]
    is_complex = isinstance(given[0], ComplexValue)
    steps, width = _real(given[0]).shape[1:]
    parts = [_part(x, name) for name in ("real", "imag")[: 1 + is_complex] for x in given]
    operands = [*parts, *[None] * (0 if is_complex else 5), None if reset is None else t.as_value(reset)]
    size = (2 * steps + 1) * width
    grads = t.graph.add("scan_backward", ((1 + is_complex) * size,), operands, steps=steps, width=width)
    index = t.graph.index(grads).view(-1, size)

    def gradient(begin: int, shape: tuple[int, ...]):
        end = begin + math.prod(shape)
        found = [Value(torch.Size(shape), None, part[begin:end].view(shape)) for part in index]
        return ComplexValue(*found) if is_complex else found[0]

    block = (1, steps, width)
    return [gradient(0, block), gradient(steps * width, block), gradient(2 * steps * width, (1, width))]


def _number(t: BlockTranslator, x):
    if isinstance(x, Tensor) and x.is_complex():
        return ComplexValue(t.as_value(x.real.contiguous()), t.as_value(x.imag.contiguous()))
    return x if isinstance(x, ComplexValue) else t.as_value(x)


def _real(x) -> Value:
    return x.real if isinstance(x, ComplexValue) else x


def _part(x, name: str):
    if x is None:
        return None
    if isinstance(x, ComplexValue):
        return getattr(x, name)
    if name == "imag":
        raise Untranslatable("a recurrence of real and complex numbers")
    return x


@handler(aten._conj.default, aten._conj_physical.default, aten.conj_physical.default)
def _conj(t: BlockTranslator, x):
    return ComplexValue(x.real, _neg(t, x.imag)) if isinstance(x, ComplexValue) else x


@handler(aten.view_as_complex.default)
def _view_as_complex(t: BlockTranslator, x):
    index = t.graph.index(x)
    return ComplexValue(*(t.graph.move(torch.select, [x], index, -1, part) for part in (0, 1)))


@handler(aten.neg.default)
def _neg(t: BlockTranslator, x):
    return _of_parts(x, lambda part: t.map("neg", part.shape, part))


@handler(aten.sum.dim_IntList)
def _sum(t: BlockTranslator, x, dims, keepdim=False, dtype=None):
    return _of_parts(x, lambda part: t.reduce(part, dims, keepdim, "sum"))


@handler(aten.masked_fill.Scalar)
def _masked_fill(t: BlockTranslator, x, mask, number):
    real, imag = (number.real, number.imag) if isinstance(number, complex) else (number, 0)
    if not isinstance(x, ComplexValue):
        return STEP_HANDLERS[aten.masked_fill.Scalar](t, x, mask, number)
    return ComplexValue(_masked_fill(t, x.real, mask, real), _masked_fill(t, x.imag, mask, imag))


@handler(aten.div.Tensor)
def _div(t: BlockTranslator, x, y):
    if not isinstance(y, ComplexValue):
        return STEP_HANDLERS[aten.div.Tensor](t, x, y)
    size = t.binary("add", t.binary("mul", y.real, y.real), t.binary("mul", y.imag, y.imag))
    inverse = ComplexValue(t.binary("div", y.real, size), _neg(t, t.binary("div", y.imag, size)))
    return STEP_HANDLERS[aten.mul.Tensor](t, x, inverse)


# ---- Norms and functions


@handler(aten.native_layer_norm.default)
def _layer_norm(t: BlockTranslator, x, shape, weight, bias, eps):
    width = math.prod(shape)
    normed = t.graph.add("norm", x.shape, [x, None, None], center=True, eps=eps, width=width)
    if weight is not None:
        normed = t.binary("mul", normed, weight)
    if bias is not None:
        normed = t.binary("add", normed, bias)
    statistic = NormStatistic(torch.Size((*x.shape[: len(x.shape) - len(shape)], *[1] * len(shape))), eps)
    return [normed, statistic, statistic]


@handler(aten.native_layer_norm_backward.default)
def _layer_norm_backward(t: BlockTranslator, grad, x, shape, mean, rstd, weight, bias, wanted):
    if not isinstance(rstd, NormStatistic):
        raise Untranslatable("the backward pass of an unknown norm")
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


@handler(aten.pow.Tensor_Scalar)
def _pow(t: BlockTranslator, x, exponent):
    if exponent == 1:
        return x
    if exponent == 2:
        return t.binary("mul", x, x)
    if exponent == 3:
        return t.binary("mul", t.binary("mul", x, x), x)
    if exponent == -0.5:
        return t.map("rsqrt", x.shape, x)
    return t.map("pow", x.shape, x, number=exponent)


@handler(aten.sigmoid_backward.default)
def _sigmoid_backward(t: BlockTranslator, grad, y):
    return t.binary("mul", grad, t.binary("mul", y, t.binary("sub", 1, y)))


@handler(aten.tanh_backward.default)
def _tanh_backward(t: BlockTranslator, grad, y):
    return t.binary("mul", grad, t.binary("sub", 1, t.binary("mul", y, y)))


@handler(aten.silu_backward.default)
def _silu_backward(t: BlockTranslator, grad, x):
    gate = t.map("sigmoid", x.shape, x)
    slope = t.binary("mul", gate, t.binary("add", t.binary("mul", x, t.binary("sub", 1, gate)), 1))
    return t.binary("mul", grad, slope)


@handler(aten.softplus_backward.default)
def _softplus_backward(t: BlockTranslator, grad, x, beta, threshold):
    return t.binary("mul", grad, t.map("sigmoid", x.shape, x if beta == 1 else t.binary("mul", x, beta)))


@handler(aten.threshold_backward.default)
def _threshold_backward(t: BlockTranslator, grad, x, threshold):
    above = t.binary("lt", t.filled(x.shape, threshold), x)
    return t.binary("mul", grad, above)


@handler(aten.gelu_backward.default)
def _gelu_backward(t: BlockTranslator, grad, x, approximate="none"):
    if approximate != "none":
        raise Untranslatable("the gradient of an approximate GeLU")
    # Φ(x) = gelu(x) / x, and its Taylor polynomial where the ratio would be 0 / 0.
    near = t.binary("lt", t.map("abs", x.shape, x), 1e-4)
    linear = t.binary("add", t.binary("mul", x, 1 / math.sqrt(2 * math.pi)), 0.5)
    ratio = t.binary("div", t.map("gelu", x.shape, x), t.map("where", x.shape, near, t.filled(x.shape, 1), x))
    cumulative = t.map("where", x.shape, near, linear, ratio)
    square = t.binary("mul", t.binary("mul", x, x), -0.5)
    density = t.binary("mul", t.map("exp", x.shape, square), 1 / math.sqrt(2 * math.pi))
    return t.binary("mul", grad, t.binary("add", cumulative, t.binary("mul", x, density)))


@handler(aten.bitwise_and.Tensor, aten.logical_and.default)
def _and(t: BlockTranslator, x, y):
    result = t.binary("mul", x, y)
    result.is_bool = True
    return result


# ---- Loss and embedding


@handler(aten._log_softmax.default)
def _log_softmax(t: BlockTranslator, x, dim, half_to_float=False):
    shifted = t.binary("sub", x, t.reduce(x, dim, True, "maximum"))
    total = t.reduce(t.map("exp", x.shape, shifted), dim, True, "sum")
    return t.binary("sub", shifted, t.map("log", total.shape, total))


@handler(aten._log_softmax_backward_data.default)
def _log_softmax_backward(t: BlockTranslator, grad, output, dim, dtype=None):
    total = t.reduce(grad, dim, True, "sum")
    return t.binary("sub", grad, t.binary("mul", t.map("exp", output.shape, output), total))


_REDUCTIONS = {0: None, 2: "sum"}


@handler(aten.nll_loss_forward.default)
def _nll_loss(t: BlockTranslator, x, labels, weight, reduction, ignored):
    _check_loss(weight, reduction, ignored)
    losses = t.graph.add("pick", x.shape[:1], [x, labels], steps=x.shape[0], width=x.shape[1])
    total = t.filled((), 0)  # of the weights; nobody reads it without weights
    return [losses if reduction == 0 else t.reduce(losses, None, False, "sum"), total]


@handler(aten.nll_loss_backward.default)
def _nll_loss_backward(t: BlockTranslator, grad, x, labels, weight, reduction, ignored, total):
    _check_loss(weight, reduction, ignored)
    fields = {"steps": x.shape[0], "width": x.shape[1], "one_grad": int(reduction == 2)}
    return t.graph.add("pick_backward", x.shape, [t.as_value(grad), labels], **fields)


def _check_loss(weight, reduction: int, ignored: int) -> None:
    if weight is not None or reduction not in _REDUCTIONS or ignored >= 0:
        raise Untranslatable("a weighted or averaged loss")


@handler(aten.embedding.default)
def _embedding(t: BlockTranslator, table, ids, padding=-1, scale_by_frequency=False, sparse=False):
    width = table.shape[1]
    operands, shape = [t.as_value(table), ids], (*ids.shape, width)
    return t.graph.add("look_up", shape, operands, steps=ids.shape.numel(), height=table.shape[0], width=width)


@handler(aten.embedding_dense_backward.default)
def _embedding_backward(t: BlockTranslator, grad, ids, height, padding, scale_by_frequency):
    if scale_by_frequency or padding >= 0:
        raise Untranslatable("an embedding with padding")
    width = grad.shape[-1]
    operands, steps = [grad, ids], ids.shape.numel()
    return t.graph.add("look_up_backward", (height, width), operands, steps=steps, height=height, width=width)


# ---- Gradients of views


def _surrounded(t: BlockTranslator, grad: Value, shape, place) -> Value:
    """Zeros of that shape, in which `place` selects the numbers of `grad`."""
    zero = t.graph.constant(t.fold(torch.zeros(1, dtype=t.graph.dtype)))
    index = torch.full(tuple(shape), int(t.graph.index(Value(torch.Size((1,)), zero))))
    place(index).copy_(t.graph.index(grad))
    return Value(torch.Size(shape), None, index)


@handler(aten.select_backward.default)
def _select_backward(t: BlockTranslator, grad, shape, dim, number):
    return _of_parts(grad, lambda part: _surrounded(t, part, shape, lambda index: index.select(dim, number)))


@handler(aten.slice_backward.default)
def _slice_backward(t: BlockTranslator, grad, shape, dim, start, end, step):
    def place(index: Tensor) -> Tensor:
        return aten.slice.Tensor(index, dim, start, end, step)

    return _of_parts(grad, lambda part: _surrounded(t, part, shape, place))


def _of_parts(x, function):
    if isinstance(x, ComplexValue):
        return ComplexValue(function(x.real), function(x.imag))
    return function(x)
