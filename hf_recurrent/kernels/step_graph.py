"""The graph of one step or block: how each vector of a stream is computed. Runners and printers work on it.

A value is a tensor as `forward` sees it, for one stream. Its elements are in buffers; `index` holds their addresses.
Operations that only move elements (views, slices, transposes, concatenations) apply to the index and cost nothing
until an operation needs the elements next to one another.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ADDRESS_BITS = 40  # an address is number of the buffer << ADDRESS_BITS | offset in it
OFFSET_MASK = (1 << ADDRESS_BITS) - 1


class UnsupportedOp(Exception):
    """An operator that the compiled kernels or the C export do not support; the text names it."""


Untranslatable = UnsupportedOp  # its name in the code of checkpoints saved before


@dataclass(eq=False)
class Buffer:
    """`width` elements of each stream, or of all streams if it is a constant.

    Args:
        name: of an input of the step, or None.
        constant: the elements, if they are the same for all streams and steps.
        node: the node that computes it, or None.
    """

    width: int
    name: str | None = None
    constant: Tensor | None = None
    node: "Node | None" = None


Slice = tuple[Buffer, int]  # the elements of a buffer from an offset on


@dataclass(eq=False)
class Node:
    """One operation; `operands` are slices (buffer, offset), `fields` depend on `kind`."""

    kind: str
    operands: list[Slice | None]
    fields: dict[str, Any] = field(default_factory=dict)
    output: Buffer = None  # type: ignore[assignment]


@dataclass(eq=False)
class Value:
    """A tensor of one stream.

    Args:
        shape: as `forward` sees it.
        buffer: the elements in order, or None if `index` is needed.
        index: addresses of the elements, int64 of that shape.
        is_bool: elements are 0 and 1.
    """

    shape: torch.Size
    buffer: Buffer | None = None
    index: Tensor | None = None
    is_bool: bool = False


@dataclass(eq=False)
class ComplexValue:
    """A complex tensor of one stream."""

    real: Value
    imag: Value


class StepGraph:
    """Nodes in the order of `forward`.

    Args:
        dtype: of the elements.
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.nodes: list[Node] = []
        self.buffers: list[Buffer] = []
        self._numbers: dict[Buffer, int] = {}
        self._constants: dict[tuple, Buffer] = {}

    def input(self, name: str, shape: torch.Size) -> Value:
        """A tensor that the step is given."""
        return Value(shape, self._add(Buffer(shape.numel(), name=name)))

    def constant(self, tensor: Tensor) -> Buffer:
        """Elements that are the same for all streams; views of one memory are one buffer."""
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        if key not in self._constants:
            self._constants[key] = self._add(Buffer(tensor.numel(), constant=tensor))
        return self._constants[key]

    def add(self, kind: str, shape: Sequence[int], operands: Sequence[Any], **fields: Any) -> Value:
        """A new node; its operands are values, slices or None."""
        slices = [self.vector(x) if isinstance(x, Value) else x for x in operands]
        shape = torch.Size(shape)
        node = Node(kind, slices, fields)
        node.output = self._add(Buffer(shape.numel(), node=node))
        self.nodes.append(node)
        return Value(shape, node.output)

    def index(self, value: Value) -> Tensor:
        """Addresses of the elements of a value, int64 of its shape.

        Raises:
            UnsupportedOp: the value is a result that no node computes.
        """
        if value.buffer is None and value.index is None:
            raise UnsupportedOp("a statistic of a norm outside of its backward pass")
        if value.index is None:
            first = self._numbers[value.buffer] << ADDRESS_BITS
            value.index = torch.arange(first, first + value.buffer.width).view(value.shape)
        return value.index

    def move(self, function: Callable[..., Any], values: Sequence[Value], *arguments: Any, **options: Any) -> Any:
        """The values after a function that moves elements; it is called with the indices."""
        moved = function(*arguments, **options)
        is_bool = any(value.is_bool for value in values)
        if isinstance(moved, Tensor):
            return self._indexed(moved, values, is_bool)
        return [self._indexed(index, values, is_bool) for index in moved]

    def _indexed(self, index: Tensor, values: Sequence[Value], is_bool: bool) -> Value:
        if len(values) == 1 and values[0].buffer is not None and index.numel() == values[0].buffer.width:
            flat = index.reshape(-1)
            if flat.numel() == 1 or bool((flat[1:] - flat[:-1] == 1).all()):
                return Value(index.shape, values[0].buffer, is_bool=is_bool)
        return Value(index.shape, None, index, is_bool)

    def vector(self, value: Value) -> Slice:
        """A slice in which the elements of a value lie next to one another."""
        if value.buffer is not None:
            return value.buffer, 0
        flat = self.index(value).reshape(-1)
        if not len(flat):
            return self.constant(torch.empty(0, dtype=self.dtype)), 0
        starts = torch.cat([flat.new_zeros(1), (flat[1:] != flat[:-1] + 1).nonzero().flatten() + 1])
        buffers = flat >> ADDRESS_BITS
        if len(starts) == 1:
            return self.buffers[int(buffers[0])], int(flat[0]) & OFFSET_MASK
        # As copies of runs, or element by element.
        pieces = []
        if len(starts) <= 8:
            ends = [*starts[1:].tolist(), len(flat)]
            for start, end in zip(starts.tolist(), ends, strict=True):
                source = self.buffers[int(buffers[start])], int(flat[start]) & OFFSET_MASK
                pieces.append((source, None, start, end - start))
        else:
            for number in buffers.unique().tolist():
                offsets = (buffers == number).nonzero().flatten()
                index = (flat[offsets] & OFFSET_MASK).to(torch.int32)
                to_index = None if len(offsets) == len(flat) else offsets.to(torch.int32)
                pieces.append(((self.buffers[number], 0), (index, to_index), 0, len(offsets)))
        moved = self.add("move", value.shape, [source for source, *_ in pieces], pieces=pieces)
        value.buffer, value.index = moved.buffer, None
        return moved.buffer, 0

    def whole(self, value: Value) -> Slice:
        """As `vector`, of a buffer with these elements only, so that the elements of the next stream follow."""
        buffer, offset = self.vector(value)
        if buffer.width == value.shape.numel() and buffer.constant is None:
            return buffer, 0
        piece = ((buffer, offset), None, 0, value.shape.numel())
        return self.add("move", value.shape, [(buffer, offset)], pieces=[piece]).buffer, 0

    def live_nodes(self, needed: Iterable[Buffer]) -> list[Node]:
        """The nodes that compute these buffers, in the order of `forward`."""
        live: set[Node] = set()
        pending = [buffer.node for buffer in needed if buffer.node is not None]
        while pending:
            node = pending.pop()
            if node not in live:
                live.add(node)
                pending += [buffer.node for buffer, _ in filter(None, node.operands) if buffer.node is not None]
        return [node for node in self.nodes if node in live]

    def _add(self, buffer: Buffer) -> Buffer:
        self._numbers[buffer] = len(self.buffers)
        self.buffers.append(buffer)
        return buffer
