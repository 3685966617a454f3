"""Lowering of torch's operators to nodes of a graph: the table of operators, and what their functions share.

`OPERATORS` maps an overload of torch to the rule that lowers it. A rule gets a [`Lowering`] and the arguments, in
which tensors that depend on the inputs are values; it returns the value of the result, or a list of them. The CPU
step, the compiled block and the C export work on the nodes, so an operator is added here and nowhere else.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .step_graph import ComplexValue, Slice, StepGraph, UnsupportedOp, Value

aten = torch.ops.aten
LoweringRule = Callable[..., Any]
OPERATORS: dict[str, LoweringRule] = {}  # name of an overload, such as "aten.add.Tensor" → its rule
# Operators that only move elements; they are applied to the index.
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


_WITH_SCALAR = {"add": "add_scalar", "mul": "mul_scalar"}


def lowers(*overloads: Any) -> Callable[[LoweringRule], LoweringRule]:
    """Register a rule for overloads; custom operators are named, because modules above this one define them."""

    def register(rule: LoweringRule) -> LoweringRule:
        OPERATORS.update(dict.fromkeys(map(str, overloads), rule))
        return rule

    return register


class NgramRows(Value):
    """Rows of hashed n-grams, which the node that reads a table at them computes."""

    def __init__(self, shape: torch.Size, windows: Value, fields: dict[str, Any]):
        super().__init__(shape)
        self.windows, self.fields = windows, fields


class Lowering:
    """Builds the graph of one step.

    Args:
        dtype: of the elements.
        fold: a constant tensor → contiguous elements that stay as they are, or are guarded.
        is_weight: true where the kernel can read a constant tensor in place.
    """

    def __init__(self, dtype: torch.dtype, fold: Callable[[Tensor], Tensor], is_weight: Callable[[Tensor], bool]):
        self.graph = StepGraph(dtype)
        self.fold, self.is_weight = fold, is_weight

    # ---- Element-wise functions

    def map(self, function: str, shape: Any, *operands: Any, scalar: float = 0.0) -> Value:
        """A node that applies one of `FUNCTIONS` element by element; operands are values or constant tensors."""
        shape = torch.Size(shape)
        return self.graph.add(
            "map", shape, [self.broadcast(x, shape) for x in operands], function=function, scalar=float(scalar)
        )

    def broadcast(self, x: Any, shape: torch.Size) -> Any:
        """An operand of `map` of that shape."""
        if isinstance(x, Value):
            if x.shape.numel() == shape.numel():
                return x
            if x.shape.numel() == 1:
                return self.graph.add("map", shape, [x], function="splat", scalar=0.0)
            return self.graph.move(torch.expand_copy, [x], self.graph.index(x), shape)
        return self.constant(x.expand(shape))

    def constant(self, tensor: Tensor) -> Slice:
        """A constant as an operand."""
        if tensor.is_complex():
            raise UnsupportedOp("a complex constant")
        tensor = self.fold(tensor)
        if tensor.dtype != self.graph.dtype:
            tensor = tensor.to(self.graph.dtype)
        return self.graph.constant(tensor), 0

    def as_value(self, x: Any) -> Value:
        """A value, or a constant tensor as one."""
        if isinstance(x, Value):
            return x
        buffer, _ = self.constant(x)
        return Value(x.shape, buffer)

    def filled(self, shape: Any, scalar: float) -> Value:
        """A value of equal elements."""
        return self.graph.add("map", shape, [], function="set", scalar=float(scalar))

    def binary(self, function: str, x: Any, y: Any) -> Value:
        """A function of two values, constants or scalars."""
        if isinstance(x, ComplexValue) or isinstance(y, ComplexValue):
            raise UnsupportedOp(f"{function} of complex numbers")
        tensors = [v for v in (x, y) if isinstance(v, Value | Tensor)]
        shape = torch.broadcast_shapes(*(v.shape for v in tensors))
        if not isinstance(y, Value | Tensor):
            if function == "sub":
                function, y = "add", -y
            if function in _WITH_SCALAR:
                return self.map(_WITH_SCALAR[function], shape, x, scalar=y)
            y = self.filled(shape, y)
        elif not isinstance(x, Value | Tensor):
            if function in _WITH_SCALAR:
                return self.map(_WITH_SCALAR[function], shape, y, scalar=x)
            if function == "sub":
                return self.map("rsub_scalar", shape, y, scalar=x)
            x = self.filled(shape, x)
        elif function == "mul":
            for join in (self._rms_norm, self._scaled_norm):
                if (normed := join(x, y) or join(y, x)) is not None:
                    return normed
        return self.map(function, shape, x, y)

    def _rms_norm(self, x: Any, scale: Any) -> Value | None:
        """x · rsqrt(mean(x²) + eps) over the last dimension as one node."""
        if not isinstance(x, Value) or not isinstance(scale, Value) or scale.buffer is None or x.buffer is None:
            return None
        root = scale.buffer.node
        if scale.shape[:-1] != x.shape[:-1] or scale.shape[-1:] != (1,) or not _is_map(root, "rsqrt"):
            return None
        total = root.operands[0][0].node
        if not _is_map(total, "add_scalar"):
            return None
        mean = total.operands[0][0].node
        if mean is None or mean.kind != "reduce" or mean.fields["reduction"] != "mean" or mean.fields["inner"] != 1:
            return None
        square = mean.operands[0][0].node
        if not _is_map(square, "mul") or [buffer for buffer, _ in square.operands] != [x.buffer] * 2:
            return None
        eps, width = total.fields["scalar"], x.shape[-1]
        return self.graph.add("norm", x.shape, [x, None, None], center=False, eps=eps, width=width)

    def _scaled_norm(self, x: Any, weight: Any) -> Value | None:
        """The weight of a norm without one becomes part of it."""
        if not isinstance(x, Value) or not isinstance(weight, Tensor) or x.buffer is None or x.buffer.node is None:
            return None
        node = x.buffer.node
        if node.kind != "norm" or node.operands[1:] != [None, None] or weight.shape != x.shape[-1:]:
            return None
        return self.graph.add("norm", x.shape, [node.operands[0], self.constant(weight), None], **node.fields)

    # ---- Sums and products

    def reduce(self, x: Value, dims: Any, keepdim: bool, reduction: str) -> Value:
        """Sum, mean, maximum or minimum over neighbouring dimensions."""
        rank = len(x.shape)
        dims = sorted({d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))})
        if dims != list(range(dims[0], dims[-1] + 1)):
            raise UnsupportedOp("a sum over dimensions that are not neighbours")
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

    def matmul(self, x: Any, y: Any, bias: Any = None) -> Value:
        """x (rows, depth) · y (depth, width) + bias."""
        if isinstance(x, Value) and isinstance(y, Tensor):
            if isinstance(bias, Tensor) and (bias.dim() == 1 or bias.shape[0] == 1):
                return self.linear(x, y.t(), bias.reshape(-1))
            product = self.linear(x, y.t())
        elif isinstance(x, Value) and isinstance(y, Value):
            product = self.batched_matmul(_with_batch(x), _with_batch(y))
            product = Value(torch.Size(product.shape[1:]), product.buffer)
        else:
            raise UnsupportedOp("aten.mm of a weight and a value")
        return product if bias is None else self.binary("add", product, bias)

    def batched_matmul(self, x: Any, y: Any) -> Value:
        """x (matrices, rows, depth) · y (matrices, depth, width)."""
        if not isinstance(x, Value) or not isinstance(y, Value):
            raise UnsupportedOp("aten.bmm with a constant")
        matrices, rows, depth = x.shape
        width = y.shape[2]
        fields = {"matrices": matrices, "rows": rows, "depth": depth, "width": width}
        return self.graph.add("product", (matrices, rows, width), [x, y], **fields)

    def embedding(self, table: Any, ids: Any) -> Value:
        """A row of a constant table (V, M) for one token id, which is an int64 input, or the rows of n-grams."""
        if isinstance(ids, NgramRows) and isinstance(table, Tensor):
            fields = ids.fields | {"weight": table.detach(), "width": table.shape[1]}
            return self.graph.add("ngrams", (*ids.shape, table.shape[1]), [ids.windows], **fields)
        if not isinstance(ids, Value) or not isinstance(table, Tensor) or ids.shape.numel() != 1:
            raise UnsupportedOp("aten.embedding of several tokens")
        width = table.shape[1]
        return self.graph.add("embedding", (*ids.shape, width), [ids], weight=table.detach(), width=width)

    # ---- Moves and conversions

    def move(self, function: Any, x: Value, arguments: list) -> Value | None:
        """The value after an operator that only moves elements, where that is known without the index."""
        if function not in _SAME_ORDER or x.buffer is None:
            return None
        shape = function(torch.empty(x.shape, device="meta"), *arguments).shape
        return Value(shape, x.buffer, is_bool=x.is_bool)

    def convert(self, value: Any, dtype: torch.dtype | None) -> Any:
        """The value in another type, where that changes no element."""
        own = self.graph.dtype
        if isinstance(value, ComplexValue):
            own = torch.complex64 if own == torch.float32 else torch.complex128
        elif dtype == own and value.buffer is not None and value.buffer.name == "ids":
            return self.graph.add("token", value.shape, [value])  # ids of steps are int64
        if dtype not in (None, own):
            raise UnsupportedOp(f"a conversion to {dtype}")
        return value


# Moves that keep the order of all elements.
_SAME_ORDER = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.contiguous.default, aten.lift_fresh.default,
}  # fmt: skip


def _is_map(node: Any, function: str) -> bool:
    return node is not None and node.kind == "map" and node.fields["function"] == function


def _with_batch(x: Value) -> Value:
    return Value(torch.Size((1, *x.shape)), x.buffer, None if x.index is None else x.index.unsqueeze(0))
