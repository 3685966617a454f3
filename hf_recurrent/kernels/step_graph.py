"""The graph of one step: what each vector of numbers of a stream is computed from.

A value is a tensor as `forward` sees it, at one stream. Its numbers lie in buffers; `index` says where, so that
operations that only move numbers (views, slices, transposes, concatenations) are moves of the index and cost nothing
until somebody needs the numbers next to one another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_SHIFT = 40  # an index is buffer << _SHIFT | place
_PLACE = (1 << _SHIFT) - 1


class Untranslatable(Exception):
    """An operation of a model has no form as operations of the kernel."""


@dataclass(eq=False)
class Buffer:
    """`width` numbers of each stream, or of all streams if it is a constant.

    Args:
        name: of an input of the step, or None.
        constant: its numbers, if they are the same for all streams and steps.
        node: the operation that computes it, or None.
    """

    width: int
    name: str | None = None
    constant: Tensor | None = None
    node: "Node | None" = None


@dataclass(eq=False)
class Node:
    """One operation; `operands` are (buffer, first place) each, `fields` are particular to `kind`."""

    kind: str
    operands: list[tuple[Buffer, int] | None]
    fields: dict[str, Any] = field(default_factory=dict)
    output: Buffer = None  # type: ignore[assignment]


@dataclass(eq=False)
class Value:
    """A tensor at one stream.

    Args:
        shape: as `forward` sees it.
        buffer: its numbers in order, or None if `index` has to be used.
        index: of the numbers, int64 of that shape.
        is_bool: numbers are 0 and 1.
    """

    shape: torch.Size
    buffer: Buffer | None = None
    index: Tensor | None = None
    is_bool: bool = False


@dataclass(eq=False)
class ComplexValue:
    """A complex tensor at one stream."""

    real: Value
    imag: Value


class StepGraph:
    """Nodes in the order of `forward`.

    Args:
        dtype: of the numbers.
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
        """Numbers that are the same for all streams; views of one memory are one buffer."""
        key = (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        if key not in self._constants:
            self._constants[key] = self._add(Buffer(tensor.numel(), constant=tensor))
        return self._constants[key]

    def add(self, kind: str, shape: Sequence[int], operands: Sequence[Any], **fields: Any) -> Value:
        """A new node; its operands are values, pairs of buffer and place, or None."""
        places = [self.vector(x) if isinstance(x, Value) else x for x in operands]
        shape = torch.Size(shape)
        node = Node(kind, places, fields)
        node.output = self._add(Buffer(shape.numel(), node=node))
        self.nodes.append(node)
        return Value(shape, node.output)

    def index(self, value: Value) -> Tensor:
        """Where the numbers of a value lie, int64 of its shape."""
        if value.index is None:
            first = self._numbers[value.buffer] << _SHIFT
            value.index = torch.arange(first, first + value.buffer.width).view(value.shape)
        return value.index

    def move(self, function: Callable[..., Any], values: Sequence[Value], *arguments: Any, **options: Any) -> Any:
        """The values after a function that moves numbers; it is called with the indices."""
        moved = function(*arguments, **options)
        is_bool = any(value.is_bool for value in values)
        if isinstance(moved, Tensor):
            return self._placed(moved, values, is_bool)
        return [self._placed(index, values, is_bool) for index in moved]

    def _placed(self, index: Tensor, values: Sequence[Value], is_bool: bool) -> Value:
        if len(values) == 1 and values[0].buffer is not None and index.numel() == values[0].buffer.width:
            flat = index.reshape(-1)
            if flat.numel() == 1 or bool((flat[1:] - flat[:-1] == 1).all()):
                return Value(index.shape, values[0].buffer, is_bool=is_bool)
        return Value(index.shape, None, index, is_bool)

    def vector(self, value: Value) -> tuple[Buffer, int]:
        """A buffer and a place from which on the numbers of a value lie next to one another."""
        if value.buffer is not None:
            return value.buffer, 0
        flat = value.index.reshape(-1)
        if not len(flat):
            return self.constant(torch.empty(0, dtype=self.dtype)), 0
        starts = torch.cat([flat.new_zeros(1), (flat[1:] != flat[:-1] + 1).nonzero().flatten() + 1])
        buffers = flat >> _SHIFT
        if len(starts) == 1:
            return self.buffers[int(buffers[0])], int(flat[0]) & _PLACE
        # As copies of runs, or number by number.
        pieces = []
        if len(starts) <= 8:
            ends = [*starts[1:].tolist(), len(flat)]
            for start, end in zip(starts.tolist(), ends, strict=True):
                source = self.buffers[int(buffers[start])], int(flat[start]) & _PLACE
                pieces.append((source, None, start, end - start))
        else:
            for number in buffers.unique().tolist():
                places = (buffers == number).nonzero().flatten()
                index = (flat[places] & _PLACE).to(torch.int32)
                to_index = None if len(places) == len(flat) else places.to(torch.int32)
                pieces.append(((self.buffers[number], 0), (index, to_index), 0, len(places)))
        moved = self.add("move", value.shape, [source for source, *_ in pieces], pieces=pieces)
        value.buffer, value.index = moved.buffer, None
        return moved.buffer, 0

    def whole(self, value: Value) -> tuple[Buffer, int]:
        """As `vector`, a buffer of these numbers only: the numbers of the next stream follow."""
        buffer, place = self.vector(value)
        if buffer.width == value.shape.numel() and buffer.constant is None:
            return buffer, 0
        piece = ((buffer, place), None, 0, value.shape.numel())
        return self.add("move", value.shape, [(buffer, place)], pieces=[piece]).buffer, 0

    def number_of(self, buffer: Buffer) -> int:
        """The place of a buffer in `buffers`."""
        return self._numbers[buffer]

    def _add(self, buffer: Buffer) -> Buffer:
        self._numbers[buffer] = len(self.buffers)
        self.buffers.append(buffer)
        return buffer
