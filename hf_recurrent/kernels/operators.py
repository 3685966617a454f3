"""The operators of torch that single steps use, as nodes of a graph; see lowering.py."""

import math

import torch
from torch import Tensor

from .lowering import Lowering, LoweringRule, NgramRows, aten, lowers
from .step_graph import ComplexValue, UnsupportedOp, Value


def _unary(function: str) -> LoweringRule:
    return lambda t, x: t.map(function, x.shape, x)


def _sum_or_difference(function: str) -> LoweringRule:
    def lower(t: Lowering, x, y, alpha=1):
        if isinstance(x, ComplexValue) or isinstance(y, ComplexValue):
            return _by_parts(t, function, x, y)
        if alpha != 1:
            y = t.binary("mul", y, alpha) if isinstance(y, Value) else y * alpha
        return t.binary(function, x, y)

    return lower


@lowers(aten.rsub.Scalar)
def _rsub(t: Lowering, x, y, alpha=1):
    return t.map("rsub_scalar", x.shape, x if alpha == 1 else t.binary("mul", x, alpha), scalar=y)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def _mul(t: Lowering, x, y):
    if not (isinstance(x, ComplexValue) or isinstance(y, ComplexValue)):
        return t.binary("mul", x, y)
    (a, b), (c, d) = _parts(x), _parts(y)
    if b is None:
        return ComplexValue(t.binary("mul", a, c), t.binary("mul", a, d))
    if d is None:
        return ComplexValue(t.binary("mul", a, c), t.binary("mul", b, c))
    real = t.binary("sub", t.binary("mul", a, c), t.binary("mul", b, d))
    return ComplexValue(real, t.binary("add", t.binary("mul", a, d), t.binary("mul", b, c)))


def each_part(x, function):
    """A function of a real value, or of the real and the imaginary part."""
    if isinstance(x, ComplexValue):
        return ComplexValue(function(x.real), function(x.imag))
    return function(x)


def _parts(x) -> tuple:
    """Real and imaginary part; None for the imaginary part of a real number."""
    if isinstance(x, ComplexValue):
        return x.real, x.imag
    if isinstance(x, Tensor) and x.is_complex():
        return x.real, x.imag
    if isinstance(x, complex):
        return x.real, x.imag
    return x, None


def _by_parts(t: Lowering, function: str, x, y) -> ComplexValue:
    (a, b), (c, d) = _parts(x), _parts(y)
    if b is None or d is None:
        raise UnsupportedOp(f"{function} of a real and a complex number")
    return ComplexValue(t.binary(function, a, c), t.binary(function, b, d))


@lowers(aten.neg.default)
def _neg(t: Lowering, x):
    return each_part(x, lambda part: t.map("neg", part.shape, part))


@lowers(aten.div.Tensor, aten.div.Scalar)
def _div(t: Lowering, x, y):
    c, d = _parts(y)
    if d is None:
        return each_part(x, lambda part: t.binary("div", part, c))
    size = t.binary("add", t.binary("mul", c, c), t.binary("mul", d, d))
    inverse = ComplexValue(t.binary("div", c, size), _neg(t, t.binary("div", d, size)))
    return _mul(t, x, inverse)


@lowers(aten.addcmul.default)
def _addcmul(t: Lowering, base, x, y, value=1):
    if any(isinstance(v, ComplexValue) or (isinstance(v, Tensor) and v.is_complex()) for v in (base, x, y)):
        return _by_parts(t, "add", base, _mul(t, x, y))
    if value != 1:
        return t.binary("add", base, t.binary("mul", t.binary("mul", x, y), value))
    shape = torch.broadcast_shapes(base.shape, x.shape, y.shape)
    return t.map("mul_add", shape, base, x, y)


@lowers(aten.addcdiv.default)
def _addcdiv(t: Lowering, base, x, y, value=1):
    ratio = t.binary("div", x, y)
    return t.binary("add", base, ratio if value == 1 else t.binary("mul", ratio, value))


@lowers(aten.pow.Tensor_Scalar)
def _pow(t: Lowering, x, exponent):
    if exponent == 1:
        return x
    if exponent in (2, 3):
        square = t.binary("mul", x, x)
        return square if exponent == 2 else t.binary("mul", square, x)
    if exponent == -0.5:
        return t.map("rsqrt", x.shape, x)
    return t.map("pow", x.shape, x, scalar=exponent)


@lowers(aten.clamp.default)
def _clamp(t: Lowering, x, low=None, high=None):
    if low is not None:
        x = t.map("at_least", x.shape, x, scalar=low)
    return x if high is None else t.map("at_most", x.shape, x, scalar=high)


@lowers(aten.gelu.default)
def _gelu(t: Lowering, x, approximate="none"):
    if approximate == "none":
        return t.map("gelu", x.shape, x)
    cube = t.binary("mul", t.binary("mul", x, x), x)
    inner = t.binary("mul", t.binary("add", x, t.binary("mul", cube, 0.044715)), math.sqrt(2 / math.pi))
    return t.binary("mul", t.binary("mul", x, 0.5), t.binary("add", t.map("tanh", x.shape, inner), 1))


@lowers(aten.softplus.default)
def _softplus(t: Lowering, x, beta=1, threshold=20):
    if threshold != 20:
        raise UnsupportedOp("softplus with another threshold")
    if beta == 1:
        return t.map("softplus", x.shape, x)
    return t.binary("mul", t.map("softplus", x.shape, t.binary("mul", x, beta)), 1 / beta)


@lowers(aten.log_sigmoid_forward.default)
def _log_sigmoid(t: Lowering, x):
    small = t.map("exp", x.shape, t.map("neg", x.shape, t.map("abs", x.shape, x)))
    return [t.binary("sub", _clamp(t, x, None, 0), t.map("log1p", x.shape, small)), None]


@lowers(aten.elu.default)
def _elu(t: Lowering, x, alpha=1, scale=1, input_scale=1):
    negative = t.binary("mul", t.map("expm1", x.shape, _clamp(t, t.binary("mul", x, input_scale), None, 0)), alpha)
    return t.binary("mul", t.binary("add", _clamp(t, x, 0), negative), scale)


@lowers(aten.where.self)
def _where(t: Lowering, condition, x, y):
    shape = torch.broadcast_shapes(condition.shape, x.shape, y.shape)
    return t.map("where", shape, condition, x, y)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(t: Lowering, x, mask, scalar):
    if isinstance(scalar, Value):
        raise UnsupportedOp("aten.masked_fill with a value that depends on the inputs")
    if isinstance(x, ComplexValue):
        parts = complex(scalar)
        real = _masked_fill(t, x.real, mask, parts.real)
        return ComplexValue(real, _masked_fill(t, x.imag, mask, parts.imag))
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return t.map("where", shape, mask, t.filled(shape, float(scalar)), x)


def _comparison(function: str, swapped: bool = False, negated: bool = False) -> LoweringRule:
    def compare(t: Lowering, x, y):
        result = t.binary(function, *((y, x) if swapped else (x, y)))
        if negated:
            result = t.map("rsub_scalar", result.shape, result, scalar=1)
        result.is_bool = True
        return result

    return compare


@lowers(aten.logical_not.default, aten.bitwise_not.default)
def _not(t: Lowering, x):
    if not x.is_bool:
        raise UnsupportedOp("logical_not of values that are not bool")
    result = t.map("rsub_scalar", x.shape, x, scalar=1)
    result.is_bool = True
    return result


@lowers(aten.sum.dim_IntList)
def _sum(t: Lowering, x, dims, keepdim=False, dtype=None):
    return each_part(x, lambda part: t.reduce(part, dims, keepdim, "sum"))


@lowers(aten.mean.dim)
def _mean(t: Lowering, x, dims, keepdim=False, dtype=None):
    return t.reduce(x, dims, keepdim, "mean")


# ---- Norms, products and attention


class NormStatistic(Value):
    """Mean or standard deviation of a norm: known to its backward pass only, which computes it again."""

    def __init__(self, shape: torch.Size, eps: float):
        super().__init__(shape)
        self.eps = eps


@lowers(aten.native_layer_norm.default)
def _layer_norm(t: Lowering, x, shape, weight, bias, eps):
    fields = {"center": True, "eps": eps, "width": math.prod(shape)}
    statistic = NormStatistic(torch.Size((*x.shape[: len(x.shape) - len(shape)], *[1] * len(shape))), eps)
    if not isinstance(weight, Value) and not isinstance(bias, Value):
        operands = [None if v is None else t.constant(v) for v in (weight, bias)]
        return [t.graph.add("norm", x.shape, [x, *operands], **fields), statistic, statistic]
    normed = t.graph.add("norm", x.shape, [x, None, None], **fields)
    if weight is not None:
        normed = t.binary("mul", normed, weight)
    if bias is not None:
        normed = t.binary("add", normed, bias)
    return [normed, statistic, statistic]


@lowers(aten.addmm.default)
def _addmm(t: Lowering, bias, x, y, beta=1, alpha=1):
    if alpha != 1 or beta != 1:
        raise UnsupportedOp("aten.addmm with factors")
    return t.matmul(x, y, bias)


@lowers(aten.cumsum.default)
def _cumsum(t: Lowering, x, dim, dtype=None):
    steps = x.shape[dim]
    if steps != x.shape.numel():
        raise UnsupportedOp("aten.cumsum of several rows")
    row = t.graph.move(torch.reshape, [x], t.graph.index(x), (1, steps))
    below = torch.ones(steps, steps, dtype=t.graph.dtype).triu()
    return Value(x.shape, t.matmul(row, below).buffer)


@lowers("hf_recurrent.ngram_rows.default")
def _ngram_rows(t: Lowering, windows, factors, orders, rows):
    if not isinstance(windows, Value):
        raise UnsupportedOp("n-grams of constants")
    shape = torch.Size((*windows.shape[:-1], len(orders)))
    steps = windows.shape[:-1].numel()
    return NgramRows(shape, windows, {"factors": factors, "orders": orders, "rows": rows, "steps": steps})


@lowers(aten._softmax.default)
def _softmax(t: Lowering, x, dim, half_to_float=False):
    if dim % len(x.shape) != len(x.shape) - 1:
        raise UnsupportedOp("softmax over another than the last dimension")
    return t.graph.add("softmax", x.shape, [x], rows=x.shape.numel() // x.shape[-1], width=x.shape[-1])


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _attention(t: Lowering, query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    if query.shape[0] != 1 or dropout_p or key.shape[1] != query.shape[1] or value.shape[3] != query.shape[3]:
        raise UnsupportedOp("attention with several sequences, other heads or dropout")
    _, heads, queries, width = query.shape
    keys = key.shape[2]
    mask = None
    if attn_mask is not None:
        if isinstance(attn_mask, Value):
            raise UnsupportedOp("attention with a mask that depends on the inputs")
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros(attn_mask.shape, dtype=t.graph.dtype).masked_fill(~attn_mask, -math.inf)
        mask = t.constant(attn_mask.expand(1, heads, queries, keys))
    fields = {"heads": heads, "queries": queries, "keys": keys, "width": width, "causal": is_causal}
    fields["scale"] = 1 / math.sqrt(width) if scale is None else scale
    return [t.graph.add("attention", query.shape, [query, key, value, mask], **fields), None]


# ---- Complex numbers, as pairs of values


@lowers(aten.view_as_real.default)
def _view_as_real(t: Lowering, x):
    parts = [x.real, x.imag]
    return t.graph.move(torch.stack, parts, [t.graph.index(part) for part in parts], -1)


@lowers(aten.constant_pad_nd.default)
def _pad(t: Lowering, x, pad, value=0):
    shape = torch.constant_pad_nd(torch.empty(x.shape, device="meta"), pad, value).shape
    number = t.graph.constant(t.fold(torch.full((1,), value, dtype=t.graph.dtype)))
    outside = int(t.graph.index(Value(torch.Size((1,)), number)))
    padded = torch.full(shape, outside)
    inside = torch.constant_pad_nd(t.graph.index(x), pad, -1)
    return Value(shape, None, torch.where(inside < 0, padded, inside))


@lowers(aten._conj.default, aten._conj_physical.default)
def _conj(t: Lowering, x):
    return ComplexValue(x.real, _neg(t, x.imag)) if isinstance(x, ComplexValue) else x


@lowers(aten.view_as_complex.default)
def _view_as_complex(t: Lowering, x):
    index = t.graph.index(x)
    return ComplexValue(*(t.graph.move(torch.select, [x], index, -1, part) for part in (0, 1)))


# ---- Rules of one line

for _packet, _rule in {
    aten.add: _sum_or_difference("add"),
    aten.sub: _sum_or_difference("sub"),
    aten.eq: _comparison("eq"),
    aten.ne: _comparison("eq", negated=True),
    aten.lt: _comparison("lt"),
    aten.le: _comparison("le"),
    aten.gt: _comparison("lt", swapped=True),
    aten.ge: _comparison("le", swapped=True),
    aten.lerp: lambda t, x, y, weight: t.binary("add", x, t.binary("mul", t.binary("sub", y, x), weight)),
}.items():
    lowers(_packet.Tensor, _packet.Scalar)(_rule)

for _packet, _rule in {
    **{getattr(aten, name): _unary(name) for name in (
        "abs", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "sigmoid", "tanh", "sin", "cos", "erf",
        "floor", "round",
    )},
    aten.maximum: lambda t, x, y: t.binary("max", x, y),
    aten.minimum: lambda t, x, y: t.binary("min", x, y),
    aten.clamp_min: lambda t, x, low: _clamp(t, x, low),
    aten.clamp_max: lambda t, x, high: _clamp(t, x, None, high),
    aten.hardtanh: lambda t, x, low=-1, high=1: _clamp(t, x, low, high),
    aten.relu: lambda t, x: _clamp(t, x, 0),
    aten.leaky_relu: lambda t, x, slope=0.01: t.binary(
        "add", _clamp(t, x, 0), t.binary("mul", _clamp(t, x, None, 0), slope)
    ),
    aten.silu: lambda t, x: t.binary("mul", x, t.map("sigmoid", x.shape, x)),
    aten.sum: lambda t, x, dtype=None: t.reduce(x, None, False, "sum"),
    aten.amax: lambda t, x, dims=(), keepdim=False: t.reduce(x, dims, keepdim, "maximum"),
    aten.amin: lambda t, x, dims=(), keepdim=False: t.reduce(x, dims, keepdim, "minimum"),
    aten.mm: lambda t, x, y: t.matmul(x, y),
    aten.bmm: lambda t, x, y: t.batched_matmul(x, y),
    aten.embedding: lambda t, table, ids, *_: t.embedding(table, ids),
    aten.complex: lambda t, real, imag: ComplexValue(t.as_value(real), t.as_value(imag)),
}.items():  # fmt: skip
    lowers(_packet.default)(_rule)
