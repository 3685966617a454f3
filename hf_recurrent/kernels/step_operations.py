"""The operations of torch as nodes of a step's graph: one function for each kind.

A handler gets a [`Translator`] and the arguments of the operation, in which tensors that depend on the step's inputs
are values; it returns the value of the result, or a list of them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .step_graph import ComplexValue, StepGraph, Untranslatable, Value

aten = torch.ops.aten
Handler = Callable[..., Any]


class Translator:
    """Builds the graph of one step; see [`trace_step`]."""

    def __init__(self, dtype: torch.dtype, fold: Callable[[Tensor], Tensor], is_weight: Callable[[Tensor], bool]):
        self.graph = StepGraph(dtype)
        self.is_weight = is_weight  # true where the kernel can read a constant tensor in its place
        self.fold = fold  # a constant tensor → contiguous numbers that stay as they are, or are guarded

    # ---- Element-wise functions

    def map(self, function: str, shape: Any, *operands: Any, number: float = 0.0) -> Value:
        """A node that applies a function to numbers at the same place; operands are values or constant tensors."""
        shape = torch.Size(shape)
        return self.graph.add(
            "map", shape, [self.broadcast(x, shape) for x in operands], function=function, number=float(number)
        )

    def broadcast(self, x: Any, shape: torch.Size) -> Any:
        """An operand of `map` of that shape."""
        if isinstance(x, Value):
            if x.shape.numel() == shape.numel():
                return x
            if x.shape.numel() == 1:
                return self.graph.add("map", shape, [x], function="splat", number=0.0)
            return self.graph.move(torch.expand_copy, [x], self.graph.index(x), shape)
        return self.constant(x.expand(shape))

    def constant(self, tensor: Tensor) -> tuple:
        """A constant as an operand."""
        if tensor.is_complex():
            raise Untranslatable("a complex constant")
        tensor = self.fold(tensor)
        if tensor.dtype != self.graph.dtype:
            tensor = tensor.to(self.graph.dtype)
        return self.graph.constant(tensor), 0

    def binary(self, function: str, x: Any, y: Any) -> Value:
        """A function of two values, constants or numbers."""
        if isinstance(x, ComplexValue) or isinstance(y, ComplexValue):
            raise Untranslatable(f"{function} of complex numbers")
        tensors = [v for v in (x, y) if isinstance(v, Value | Tensor)]
        shape = torch.broadcast_shapes(*(v.shape for v in tensors))
        numbers = {"add": "add_number", "mul": "mul_number"}
        if not isinstance(y, Value | Tensor):
            if function in numbers:
                return self.map(numbers[function], shape, x, number=y)
            if function == "sub":
                return self.map("add_number", shape, x, number=-y)
            if function == "div":
                return self.map("div", shape, x, self.filled(shape, y))
            y = self.filled(shape, y)
        elif not isinstance(x, Value | Tensor):
            if function in numbers:
                return self.map(numbers[function], shape, y, number=x)
            if function == "sub":
                return self.map("rsub_number", shape, y, number=x)
            x = self.filled(shape, x)
        elif function == "mul" and (normed := self._rms_norm(x, y) or self._rms_norm(y, x)) is not None:
            return normed
        elif function == "mul" and (scaled := self._scaled_norm(x, y) or self._scaled_norm(y, x)) is not None:
            return scaled
        return self.map(function, shape, x, y)

    def filled(self, shape: Any, number: float) -> Value:
        """A value that is one number everywhere."""
        return self.graph.add("map", shape, [], function="set", number=float(number))

    def _rms_norm(self, x: Any, scale: Any) -> Value | None:
        """x · rsqrt(mean(x²) + eps) over the last dimension as one node."""
        if not isinstance(x, Value) or not isinstance(scale, Value) or scale.buffer is None or x.buffer is None:
            return None
        root = scale.buffer.node
        if scale.shape[:-1] != x.shape[:-1] or scale.shape[-1:] != (1,) or not _is_map(root, "rsqrt"):
            return None
        total = root.operands[0][0].node
        if not _is_map(total, "add_number"):
            return None
        mean = total.operands[0][0].node
        if mean is None or mean.kind != "reduce" or mean.fields["reduction"] != "mean" or mean.fields["inner"] != 1:
            return None
        square = mean.operands[0][0].node
        if not _is_map(square, "mul") or [buffer for buffer, _ in square.operands] != [x.buffer] * 2:
            return None
        eps, width = total.fields["number"], x.shape[-1]
        return self.graph.add("norm", x.shape, [x, None, None], center=False, eps=eps, width=width)

    def _scaled_norm(self, x: Any, weight: Any) -> Value | None:
        """The weight of a norm without one becomes part of it."""
        if not isinstance(x, Value) or not isinstance(weight, Tensor) or x.buffer is None or x.buffer.node is None:
            return None
        node = x.buffer.node
        if node.kind != "norm" or node.operands[1:] != [None, None] or weight.shape != x.shape[-1:]:
            return None
        return self.graph.add("norm", x.shape, [node.operands[0], self.constant(weight), None], **node.fields)

    # ---- Others

    def reduce(self, x: Value, dims: Any, keepdim: bool, reduction: str) -> Value:
        """Sum, mean, maximum or minimum over neighbouring dimensions."""
        rank = len(x.shape)
        dims = sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))})
        if dims != list(range(dims[0], dims[-1] + 1)):
            raise Untranslatable("a sum over dimensions that are not neighbours")
        shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
        inner = math.prod(x.shape[dims[-1] + 1 :])
        fields = {"outer": math.prod(x.shape[: dims[0]]), "inner": inner, "reduction": reduction}
        fields["count"] = math.prod(x.shape[d] for d in dims)
        if not keepdim:
            shape = [size for d, size in enumerate(shape) if d not in dims]
        return self.graph.add("reduce", shape, [x], **fields)

    def linear(self, x: Value, weight: Tensor, bias: Any = None) -> Value:
        """x Wᵀ + b for a constant weight (width, depth)."""
        width, depth = weight.shape
        if (weight.stride(1) != 1 and depth > 1) or not self.is_weight(weight):
            weight = self.fold(weight)
        if bias is not None:
            bias = self.constant(bias.expand(width))
        count = x.shape.numel() // depth
        shape = (*x.shape[:-1], width)
        x = x if count == 1 else self.graph.whole(x)
        return self.graph.add("linear", shape, [x, bias], weight=weight, count=count, width=width, depth=depth)


def _is_map(node: Any, function: str) -> bool:
    return node is not None and node.kind == "map" and node.fields["function"] == function


# ---- Handlers

HANDLERS: dict[Any, Handler] = {}
# Operations that only move numbers.
MOVES = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.select.int, aten.slice.Tensor, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unbind.int, aten.cat.default,
    aten.stack.default, aten.clone.default, aten.alias.default, aten.detach.default, aten.roll.default,
    aten.flip.default, aten.gather.default, aten.index_select.default, aten.index.Tensor, aten.repeat.default,
    aten.unfold.default, aten.diagonal.default, aten.lift_fresh.default, aten.contiguous.default,
    aten.chunk.default, aten.narrow.default,
}  # fmt: skip


def handler(*operations: Any) -> Callable[[Handler], Handler]:
    """Register a function for operations."""

    def register(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(operations, function))
        return function

    return register


def _unary(function: str) -> Handler:
    return lambda t, x: t.map(function, x.shape, x)


for _operation, _function in {
    aten.neg: "neg", aten.abs: "abs", aten.sqrt: "sqrt", aten.rsqrt: "rsqrt", aten.reciprocal: "reciprocal",
    aten.exp: "exp", aten.expm1: "expm1", aten.log: "log", aten.log1p: "log1p", aten.sigmoid: "sigmoid",
    aten.tanh: "tanh", aten.sin: "sin", aten.cos: "cos", aten.erf: "erf", aten.floor: "floor", aten.round: "round",
}.items():  # fmt: skip
    HANDLERS[_operation.default] = _unary(_function)


@handler(aten.add.Tensor, aten.add.Scalar)
def _add(t: Translator, x, y, alpha=1):
    if isinstance(x, ComplexValue) or isinstance(y, ComplexValue):
        return _of_parts(t, "add", x, y)
    return t.binary("add", x, y if alpha == 1 else t.binary("mul", y, alpha) if isinstance(y, Value) else y * alpha)


@handler(aten.sub.Tensor, aten.sub.Scalar)
def _sub(t: Translator, x, y, alpha=1):
    if isinstance(x, ComplexValue) or isinstance(y, ComplexValue):
        return _of_parts(t, "sub", x, y)
    return t.binary("sub", x, y if alpha == 1 else t.binary("mul", y, alpha) if isinstance(y, Value) else y * alpha)


@handler(aten.rsub.Scalar)
def _rsub(t: Translator, x, y, alpha=1):
    return t.map("rsub_number", x.shape, x if alpha == 1 else t.binary("mul", x, alpha), number=y)


@handler(aten.mul.Tensor, aten.mul.Scalar)
def _mul(t: Translator, x, y):
    if not (isinstance(x, ComplexValue) or isinstance(y, ComplexValue)):
        return t.binary("mul", x, y)
    (a, b), (c, d) = _parts(x), _parts(y)
    if b is None:
        return ComplexValue(t.binary("mul", a, c), t.binary("mul", a, d))
    if d is None:
        return ComplexValue(t.binary("mul", a, c), t.binary("mul", b, c))
    real = t.binary("sub", t.binary("mul", a, c), t.binary("mul", b, d))
    return ComplexValue(real, t.binary("add", t.binary("mul", a, d), t.binary("mul", b, c)))


def _parts(x) -> tuple:
    """Real and imaginary part; None for the latter of a real number."""
    if isinstance(x, ComplexValue):
        return x.real, x.imag
    if isinstance(x, Tensor) and x.is_complex():
        return x.real, x.imag
    if isinstance(x, complex):
        return x.real, x.imag
    return x, None


def _of_parts(t: Translator, function: str, x, y) -> ComplexValue:
    (a, b), (c, d) = _parts(x), _parts(y)
    if b is None or d is None:
        raise Untranslatable(f"{function} of a real and a complex number")
    return ComplexValue(t.binary(function, a, c), t.binary(function, b, d))


@handler(aten.div.Tensor, aten.div.Scalar)
def _div(t: Translator, x, y):
    if isinstance(x, ComplexValue) and _parts(y)[1] is None:
        return ComplexValue(t.binary("div", x.real, y), t.binary("div", x.imag, y))
    return t.binary("div", x, y)


@handler(aten.addcmul.default)
def _addcmul(t: Translator, base, x, y, value=1):
    if any(isinstance(v, ComplexValue) or (isinstance(v, Tensor) and v.is_complex()) for v in (base, x, y)):
        return _of_parts(t, "add", base, _mul(t, x, y))
    if value != 1:
        return t.binary("add", base, t.binary("mul", t.binary("mul", x, y), value))
    shape = torch.broadcast_shapes(base.shape, x.shape, y.shape)
    return t.map("mul_add", shape, base, x, y)


@handler(aten.addcdiv.default)
def _addcdiv(t: Translator, base, x, y, value=1):
    ratio = t.binary("div", x, y)
    return t.binary("add", base, ratio if value == 1 else t.binary("mul", ratio, value))


@handler(aten.lerp.Tensor, aten.lerp.Scalar)
def _lerp(t: Translator, x, y, weight):
    return t.binary("add", x, t.binary("mul", t.binary("sub", y, x), weight))


@handler(aten.pow.Tensor_Scalar)
def _pow(t: Translator, x, exponent):
    if exponent == 2:
        return t.map("mul", x.shape, x, x)
    return t.map("pow", x.shape, x, number=exponent)


@handler(aten.square.default)
def _square(t: Translator, x):
    return t.map("mul", x.shape, x, x)


@handler(aten.maximum.default)
def _maximum(t: Translator, x, y):
    return t.binary("max", x, y)


@handler(aten.minimum.default)
def _minimum(t: Translator, x, y):
    return t.binary("min", x, y)


@handler(aten.clamp.default)
def _clamp(t: Translator, x, low=None, high=None):
    if low is not None:
        x = t.map("at_least", x.shape, x, number=low)
    return x if high is None else t.map("at_most", x.shape, x, number=high)


@handler(aten.clamp_min.default)
def _clamp_min(t: Translator, x, low):
    return _clamp(t, x, low)


@handler(aten.clamp_max.default)
def _clamp_max(t: Translator, x, high):
    return _clamp(t, x, None, high)


@handler(aten.hardtanh.default)
def _hardtanh(t: Translator, x, low=-1, high=1):
    return _clamp(t, x, low, high)


@handler(aten.relu.default)
def _relu(t: Translator, x):
    return _clamp(t, x, 0)


@handler(aten.silu.default)
def _silu(t: Translator, x):
    return t.binary("mul", x, t.map("sigmoid", x.shape, x))


@handler(aten.gelu.default)
def _gelu(t: Translator, x, approximate="none"):
    if approximate == "none":
        return t.map("gelu", x.shape, x)
    cube = t.binary("mul", t.binary("mul", x, x), x)
    inner = t.binary("mul", t.binary("add", x, t.binary("mul", cube, 0.044715)), math.sqrt(2 / math.pi))
    return t.binary("mul", t.binary("mul", x, 0.5), t.binary("add", t.map("tanh", x.shape, inner), 1))


@handler(aten.softplus.default)
def _softplus(t: Translator, x, beta=1, threshold=20):
    if threshold != 20:
        raise Untranslatable("softplus with another threshold")
    if beta == 1:
        return t.map("softplus", x.shape, x)
    return t.binary("mul", t.map("softplus", x.shape, t.binary("mul", x, beta)), 1 / beta)


@handler(aten.log_sigmoid_forward.default)
def _log_sigmoid(t: Translator, x):
    small = t.map("exp", x.shape, t.map("neg", x.shape, t.map("abs", x.shape, x)))
    return [t.binary("sub", _clamp(t, x, None, 0), t.map("log1p", x.shape, small)), None]


@handler(aten.elu.default)
def _elu(t: Translator, x, alpha=1, scale=1, input_scale=1):
    negative = t.binary("mul", t.map("expm1", x.shape, _clamp(t, t.binary("mul", x, input_scale), None, 0)), alpha)
    return t.binary("mul", t.binary("add", _clamp(t, x, 0), negative), scale)


@handler(aten.leaky_relu.default)
def _leaky_relu(t: Translator, x, slope=0.01):
    return t.binary("add", _clamp(t, x, 0), t.binary("mul", _clamp(t, x, None, 0), slope))


@handler(aten.where.self)
def _where(t: Translator, condition, x, y):
    shape = torch.broadcast_shapes(condition.shape, x.shape, y.shape)
    return t.map("where", shape, condition, x, y)


@handler(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(t: Translator, x, mask, number):
    if isinstance(number, Value) or isinstance(x, ComplexValue):
        raise Untranslatable("masked_fill")
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return t.map("where", shape, mask, t.filled(shape, float(number)), x)


def _comparison(function: str, swapped: bool = False, negated: bool = False) -> Handler:
    def compare(t: Translator, x, y):
        result = t.binary(function, *((y, x) if swapped else (x, y)))
        if negated:
            result = t.map("rsub_number", result.shape, result, number=1)
        result.is_bool = True
        return result

    return compare


for _operation, _arguments in {
    aten.eq: ("eq",), aten.ne: ("eq", False, True), aten.lt: ("lt",), aten.le: ("le",), aten.gt: ("lt", True),
    aten.ge: ("le", True),
}.items():  # fmt: skip
    HANDLERS[_operation.Tensor] = HANDLERS[_operation.Scalar] = _comparison(*_arguments)


@handler(aten.logical_not.default, aten.bitwise_not.default)
def _not(t: Translator, x):
    if not x.is_bool:
        raise Untranslatable("logical_not of numbers")
    result = t.map("rsub_number", x.shape, x, number=1)
    result.is_bool = True
    return result


@handler(aten.sum.dim_IntList)
def _sum(t: Translator, x, dims, keepdim=False, dtype=None):
    return t.reduce(x, dims, keepdim, "sum")


@handler(aten.sum.default)
def _sum_all(t: Translator, x, dtype=None):
    return t.reduce(x, None, False, "sum")


@handler(aten.mean.dim)
def _mean(t: Translator, x, dims, keepdim=False, dtype=None):
    return t.reduce(x, dims, keepdim, "mean")


@handler(aten.amax.default)
def _amax(t: Translator, x, dims=(), keepdim=False):
    return t.reduce(x, dims, keepdim, "maximum")


@handler(aten.amin.default)
def _amin(t: Translator, x, dims=(), keepdim=False):
    return t.reduce(x, dims, keepdim, "minimum")


@handler(aten.native_layer_norm.default)
def _layer_norm(t: Translator, x, shape, weight, bias, eps):
    width = math.prod(shape)
    operands = [None if v is None else t.constant(v) for v in (weight, bias)]
    return [t.graph.add("norm", x.shape, [x, *operands], center=True, eps=eps, width=width), None, None]


@handler(aten.mm.default)
def _mm(t: Translator, x, y):
    if isinstance(x, Value) and isinstance(y, Tensor):
        return t.linear(x, y.t())
    if isinstance(x, Value) and isinstance(y, Value):
        return _bmm(t, _with_matrices(x), _with_matrices(y), shape=(x.shape[0], y.shape[1]))
    raise Untranslatable("mm of a weight and a value")


def _with_matrices(x: Value) -> Value:
    return Value(torch.Size((1, *x.shape)), x.buffer, None if x.index is None else x.index.unsqueeze(0))


@handler(aten.addmm.default)
def _addmm(t: Translator, bias, x, y, beta=1, alpha=1):
    if alpha != 1 or beta != 1:
        raise Untranslatable("addmm with factors")
    constant = isinstance(x, Value) and isinstance(y, Tensor) and isinstance(bias, Tensor)
    if constant and (bias.dim() == 1 or bias.shape[0] == 1):
        return t.linear(x, y.t(), bias.reshape(-1))
    return t.binary("add", _mm(t, x, y), bias)


@handler(aten.bmm.default)
def _bmm(t: Translator, x, y, shape=None):
    if not isinstance(x, Value) or not isinstance(y, Value):
        raise Untranslatable("bmm with a constant")
    matrices, rows, depth = x.shape
    width = y.shape[2]
    shape = (matrices, rows, width) if shape is None else shape
    return t.graph.add("product", shape, [x, y], matrices=matrices, rows=rows, depth=depth, width=width)


@handler(aten._softmax.default)
def _softmax(t: Translator, x, dim, half_to_float=False):
    if dim % len(x.shape) != len(x.shape) - 1:
        raise Untranslatable("softmax over another than the last dimension")
    return t.graph.add("softmax", x.shape, [x], rows=x.shape.numel() // x.shape[-1], width=x.shape[-1])


@handler(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(t: Translator, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if query.shape[0] != 1 or dropout_p or key.shape[1] != query.shape[1] or value.shape[3] != query.shape[3]:
        raise Untranslatable("attention with several sequences, other heads or dropout")
    _, heads, queries, width = query.shape
    keys = key.shape[2]
    mask = None
    if attn_mask is not None:
        if isinstance(attn_mask, Value):
            raise Untranslatable("attention with a mask that depends on the inputs")
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(attn_mask.shape, dtype=t.graph.dtype).masked_fill(~attn_mask, -math.inf)
        mask = t.constant(attn_mask.expand(1, heads, queries, keys))
    fields = {"heads": heads, "queries": queries, "keys": keys, "width": width, "causal": is_causal}
    fields["scale"] = 1 / math.sqrt(width) if scale is None else scale
    return [t.graph.add("attention", query.shape, [query, key, value, mask], **fields), None]


# ---- Complex numbers, as pairs of values


@handler(aten.complex.default)
def _complex(t: Translator, real, imag):
    return ComplexValue(_as_value(t, real), _as_value(t, imag))


def _as_value(t: Translator, x) -> Value:
    if isinstance(x, Value):
        return x
    buffer, _ = t.constant(x)
    return Value(x.shape, buffer)


@handler(aten.view_as_real.default)
def _view_as_real(t: Translator, x):
    parts = [x.real, x.imag]
    return t.graph.move(torch.stack, parts, [t.graph.index(part) for part in parts], -1)


@handler(aten.constant_pad_nd.default)
def _pad(t: Translator, x, pad, value=0):
    shape = torch.constant_pad_nd(torch.empty(x.shape, device="meta"), pad, value).shape
    number = t.graph.constant(t.fold(torch.full((1,), value, dtype=t.graph.dtype)))
    outside = int(t.graph.index(Value(torch.Size((1,)), number)))
    padded = torch.full(shape, outside)
    inside = torch.constant_pad_nd(t.graph.index(x), pad, -1)
    return Value(shape, None, torch.where(inside < 0, padded, inside))
