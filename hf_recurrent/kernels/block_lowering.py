"""Lowering of the forward and backward pass of a block: weights are values, because they change between blocks."""

import math
from typing import Any

import torch
from torch import Tensor

from .lowering import Lowering, NgramRows, aten
from .step_graph import Slice, UnsupportedOp, Value


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


class BlockLowering(Lowering):
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

    def matmul(self, x: Any, y: Any, bias: Any = None) -> Value:
        """Each factor as it is or transposed."""
        (a, a_row, a_depth), (b, b_depth, b_width) = self._matrix(x), self._matrix(y)
        if b_width != 1 and a_depth != 1:
            b, b_depth, b_width = self.graph.vector(y), y.shape[1], 1
        fields = {"rows": x.shape[0], "depth": x.shape[1], "width": y.shape[1]}
        fields |= {"a_row": a_row, "a_depth": a_depth, "b_depth": b_depth, "b_width": b_width}
        product = self.graph.add("matmul", (x.shape[0], y.shape[1]), [a, b], **fields)
        return product if bias is None else self.binary("add", product, bias)

    def _matrix(self, x: Any) -> tuple[Slice, int, int]:
        """Its elements, and the distances between its rows and between its columns."""
        if isinstance(x, Transposed):
            return self.graph.vector(x.of), 1, x.shape[0]
        return self.graph.vector(self.as_value(x)), x.shape[1], 1

    def batched_matmul(self, x: Any, y: Any) -> Value:
        if x.shape[0] != 1:
            raise UnsupportedOp("aten.bmm of several matrices")
        product = self.matmul(*map(self._without_batch, (x, y)))
        return Value(torch.Size((1, *product.shape)), product.buffer)

    def _without_batch(self, x: Any) -> Value:
        x = self.as_value(x)
        return Value(torch.Size(x.shape[1:]), x.buffer, None if x.index is None else x.index.squeeze(0))

    def embedding(self, table: Any, ids: Any) -> Value:
        """Rows of a table for token ids in elements of the block's type."""
        height, width = table.shape
        if isinstance(ids, NgramRows):
            operands = [ids.windows, self.as_value(table)]
            return self.graph.add("ngrams", (*ids.shape, width), operands, **ids.fields, width=width)
        fields = {"steps": ids.shape.numel(), "height": height, "width": width}
        return self.graph.add("lookup", (*ids.shape, width), [self.as_value(table), ids], **fields)

    def move(self, function: Any, x: Value, arguments: list) -> Value | None:
        if function in (aten.t.default, aten.transpose.int) and len(x.shape) == 2:
            if arguments and arguments[0] % 2 == arguments[1] % 2:
                return x
            return x.of if isinstance(x, Transposed) else Transposed(x, self.graph.index)
        if function is aten.expand.default:
            shape = function(torch.empty(x.shape, device="meta"), *arguments).shape
            if shape.numel() > x.shape.numel():
                expanded = self.broadcast(x, shape)
                return Value(shape, expanded.buffer, expanded.index, x.is_bool)
            return None if x.buffer is None else Value(shape, x.buffer, is_bool=x.is_bool)
        return super().move(function, x, arguments)

    def convert(self, value: Any, dtype: torch.dtype | None) -> Any:
        if not isinstance(value, Value) or dtype is None or dtype.is_complex:
            return super().convert(value, dtype)
        # Token ids and labels are integers in elements of the block's type.
        if dtype == torch.bool and not value.is_bool:
            raise UnsupportedOp("a conversion to bool")
        if dtype.is_floating_point and dtype != self.graph.dtype:
            raise UnsupportedOp(f"a conversion to {dtype}")
        return Value(value.shape, value.buffer, value.index, is_bool=dtype == torch.bool)
