"""The element-wise functions of a graph: their opcodes in the kernel, their references in torch and their text in C.

A node of the kind "map" applies one of them. The position in the table is the opcode, as in `enum function` of
bytecode.h.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Function:
    """An element-wise function.

    Args:
        name: in graphs.
        operands: their number.
        reference: (operands …, scalar) → result, in torch.
        c: float32 in C; {0}, {1}, {2} are the operands, {s} is the scalar, NAME_ the prefix of helper functions.
        domain: the range of arguments on which it is compared with the reference.
    """

    name: str
    operands: int
    reference: Callable[..., Tensor]
    c: str
    domain: tuple[float, float] = (-4.0, 4.0)


_ALL = (
    Function("copy", 1, lambda x, s: x, "{0}"),
    Function("splat", 1, lambda x, s: x, "{0}"),  # the first element everywhere
    Function("set", 0, lambda s: torch.tensor(s, dtype=torch.float64), "{s}"),
    Function("add", 2, lambda x, y, s: x + y, "({0} + {1})"),
    Function("sub", 2, lambda x, y, s: x - y, "({0} - {1})"),
    Function("mul", 2, lambda x, y, s: x * y, "({0} * {1})"),
    Function("div", 2, lambda x, y, s: x / y, "({0} / {1})", (0.25, 4.0)),
    Function("max", 2, lambda x, y, s: torch.maximum(x, y), "fmaxf({0}, {1})"),
    Function("min", 2, lambda x, y, s: torch.minimum(x, y), "fminf({0}, {1})"),
    Function("add_scalar", 1, lambda x, s: x + s, "({0} + {s})"),
    Function("mul_scalar", 1, lambda x, s: x * s, "({0} * {s})"),
    Function("rsub_scalar", 1, lambda x, s: s - x, "({s} - {0})"),
    Function("at_least", 1, lambda x, s: x.clamp_min(s), "fmaxf({0}, {s})"),
    Function("at_most", 1, lambda x, s: x.clamp_max(s), "fminf({0}, {s})"),
    Function("neg", 1, lambda x, s: -x, "(-{0})"),
    Function("abs", 1, lambda x, s: x.abs(), "fabsf({0})"),
    Function("sqrt", 1, lambda x, s: x.sqrt(), "sqrtf({0})", (0.0, 9.0)),
    Function("rsqrt", 1, lambda x, s: x.rsqrt(), "(1.0f / sqrtf({0}))", (0.01, 9.0)),
    Function("reciprocal", 1, lambda x, s: 1 / x, "(1.0f / {0})", (0.25, 9.0)),
    Function("exp", 1, lambda x, s: x.exp(), "expf({0})"),
    Function("expm1", 1, lambda x, s: x.expm1(), "expm1f({0})"),
    Function("log", 1, lambda x, s: x.log(), "logf({0})", (0.01, 9.0)),
    Function("log1p", 1, lambda x, s: x.log1p(), "log1pf({0})", (-0.9, 9.0)),
    Function("sigmoid", 1, lambda x, s: x.sigmoid(), "NAME_sigmoid({0})"),
    Function("tanh", 1, lambda x, s: x.tanh(), "tanhf({0})"),
    Function("gelu", 1, lambda x, s: F.gelu(x), "NAME_gelu({0})"),
    Function("softplus", 1, lambda x, s: F.softplus(x), "NAME_softplus({0})"),
    Function("sin", 1, lambda x, s: x.sin(), "sinf({0})"),
    Function("cos", 1, lambda x, s: x.cos(), "cosf({0})"),
    Function("erf", 1, lambda x, s: x.erf(), "erff({0})"),
    Function("pow", 1, lambda x, s: x**s, "powf({0}, {s})", (0.1, 4.0)),
    Function("floor", 1, lambda x, s: x.floor(), "floorf({0})"),
    Function("round", 1, lambda x, s: x.round(), "rintf({0})"),
    Function("mul_add", 3, lambda x, y, z, s: x + y * z, "({0} + {1} * {2})"),
    Function("where", 3, lambda x, y, z, s: torch.where(x != 0, y, z), "({0} != 0.0f ? {1} : {2})"),
    Function("eq", 2, lambda x, y, s: (x == y).to(x), "(float)({0} == {1})"),
    Function("lt", 2, lambda x, y, s: (x < y).to(x), "(float)({0} < {1})"),
    Function("le", 2, lambda x, y, s: (x <= y).to(x), "(float)({0} <= {1})"),
)
FUNCTIONS = {function.name: function for function in _ALL}
FUNCTION_OPCODES = {name: opcode for opcode, name in enumerate(FUNCTIONS)}
