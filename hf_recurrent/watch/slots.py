"""Counts at one place: of the values at a word of a template, and of the successors of a line."""

import re
from collections.abc import Sequence
from typing import Any

from hf_recurrent.watch.variables import ADDRESS, HEX, NUMBER, TIME, UUID

# Buckets of counts: 0, 1, 2-3, 4-7, ..., 64 and more. What has come that often is not rare.
BUCKETS, FREQUENT = 8, 64
_MOST_VALUES, _MOST_SHAPES, _MOST_FOLLOWERS = 256, 64, 256
# A slot whose values are new in more than this share of its lines holds identifiers, which are not compared.
_FREE_SHARE, _FREE_LEAST = 0.1, 12
# Lines with a number of so many digits that make it usual.
CONFIRMED = 3

_ZEROS = re.compile(b"0+")
_OPAQUE = re.compile(b"[" + TIME + UUID + HEX + b"]+")
_COUNTED = bytes.maketrans(ADDRESS + NUMBER, b"00")


# Lines among which a template is counted.
NEAR = 16


def rare_share(
    low: Sequence[float], total: float, everywhere: Sequence[float], lines: float, bucket: int, prior: float
) -> float:
    """Share of what came at one place that had at most as high a count.

    Args:
        low: how often something came there that had a count in each bucket.
        total: how often anything came there.
        everywhere, lines: the same of all such places, whose share is the prior.
        bucket: of the count.
        prior: times that the prior counts.
    """
    usual = (sum(everywhere[: bucket + 1]) + 1) / (lines + 1)
    return (sum(low[: bucket + 1]) + prior * usual) / (total + prior)


class Shape:
    """A value with all digits 0.

    Attributes:
        count: lines that had it.
        sizes: digits of each of its numbers.
    """

    __slots__ = ("count", "sizes")

    def __init__(self, count: int, sizes: list[int]):
        self.count, self.sizes = count, sizes


class Slot:
    """The values at one word of a template.

    Attributes:
        born: lines of the template before the first of the slot.
        values: value → count; None for identifiers, whose values are not compared.
        low, shapes_low: how often a value, or a shape, came that had a count in each bucket.
        shapes: values with all digits 0.
        digits: number of numbers in a value → most digits of each, in shapes that have come several times.
    """

    __slots__ = ("born", "digits", "low", "shapes", "shapes_low", "values")

    def __init__(self, born: int):
        self.born = born
        self.values: dict[bytes, int] | None = {}
        self.low, self.shapes_low = [0] * BUCKETS, [0] * BUCKETS
        self.shapes: dict[bytes, Shape] = {}
        self.digits: dict[int, list[int]] = {}

    def add(self, value: bytes, count: int, lines: int) -> None:
        """Count a value that has come `count` times, after `lines` other values."""
        if self.values is None:
            return
        self.values[value] = count + 1
        is_free = count == 0 and self.low[0] > _FREE_LEAST and self.low[0] > _FREE_SHARE * lines
        if is_free or len(self.values) > _MOST_VALUES:
            self.values = None

    def shape_of(self, filled: bytes, *, is_wildcard: bool) -> Shape | None:
        """The shape of a value; None for a further one where there are many.

        Args:
            filled: the value as in `Masked.filled`.
            is_wildcard: the words at this place differ, so that only numbers are compared.
        """
        text = _OPAQUE.sub(b"?", filled).translate(_COUNTED)
        numbers = _ZEROS.findall(text)
        if is_wildcard:
            text = b" ".join(numbers)
        shape = self.shapes.get(text)
        if shape is None and len(self.shapes) < _MOST_SHAPES:
            shape = self.shapes[text] = Shape(0, [len(zeros) for zeros in numbers])
        return shape

    def excess(self, shape: Shape) -> int:
        """Digits that a number of a shape has more than is usual."""
        most = self.digits.get(len(shape.sizes))
        return 0 if most is None else max((x - y for x, y in zip(shape.sizes, most, strict=True)), default=0)

    def add_shape(self, shape: Shape) -> None:
        """Count a shape."""
        self.shapes_low[min(shape.count.bit_length(), BUCKETS - 1)] += 1
        shape.count += 1
        if shape.count == CONFIRMED or not self.digits:
            most = self.digits.get(len(shape.sizes), shape.sizes)
            self.digits[len(shape.sizes)] = [max(pair) for pair in zip(shape.sizes, most, strict=True)]

    def state(self) -> list[Any]:
        """JSON for [`load`]."""
        values = None if self.values is None else [[key.decode("latin-1"), n] for key, n in self.values.items()]
        shapes = [[key.decode("latin-1"), shape.count, shape.sizes] for key, shape in self.shapes.items()]
        return [self.born, values, self.low, shapes, self.shapes_low, list(self.digits.items())]

    @classmethod
    def load(cls, state: list[Any]) -> "Slot":
        """The slot of a [`state`]."""
        slot = cls(state[0])
        slot.values = None if state[1] is None else {key.encode("latin-1"): n for key, n in state[1]}
        slot.low, slot.shapes_low = state[2], state[4]
        slot.shapes = {key.encode("latin-1"): Shape(count, sizes) for key, count, sizes in state[3]}
        slot.digits = dict(state[5])
        return slot


class Order:
    """Successors of a symbol, and how rare they and its predecessors were.

    Attributes:
        after: symbol → how often it came next.
        after_low, before_low: how often a successor, or a predecessor, came that had a count in each bucket.
    """

    __slots__ = ("after", "after_low", "before_low")

    def __init__(self) -> None:
        self.after: dict[int, int] = {}
        self.after_low, self.before_low = [0] * BUCKETS, [0] * BUCKETS

    def add(self, symbol: int, count: int) -> None:
        """Count a successor that has come `count` times; the rarest half is forgotten if there are too many."""
        self.after[symbol] = count + 1
        if len(self.after) > _MOST_FOLLOWERS:
            kept = sorted(self.after.items(), key=lambda item: -item[1])
            self.after = dict(kept[: _MOST_FOLLOWERS // 2])

    def usual(self, total: int) -> tuple[int, float] | None:
        """The successor that came most often, and its share of `total`; None if there is none."""
        if not self.after:
            return None
        best = max(self.after, key=self.after.__getitem__)
        return best, min(self.after[best] / max(total, 1), 1.0)

    def state(self) -> list[Any]:
        """JSON for [`load`]."""
        return [list(self.after.items()), self.after_low, self.before_low]

    @classmethod
    def load(cls, state: list[Any]) -> "Order":
        """The order of a [`state`]."""
        order = cls()
        order.after, order.after_low, order.before_low = dict(state[0]), state[1], state[2]
        return order
