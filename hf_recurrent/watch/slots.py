"""Counts at one place: of the values at a word of a template, and of the successors of a line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_recurrent.watch.saved_state import Saved
from hf_recurrent.watch.variables import ADDRESS, HEX, NUMBER, TIME, UUID

# Buckets of counts: 0, 1, 2-3, 4-7, ..., 64 and more. What has come that often is not rare.
BUCKETS, FREQUENT = 8, 64
_MOST_VALUES, _MOST_SHAPES, _MOST_FOLLOWERS = 256, 64, 256
# A slot whose values are new in more than this share of its lines holds identifiers, which are not compared.
_FREE_SHARE, _FREE_LEAST = 0.1, 12
# Very few lines: fewer than this and than this share. Digits are counted up to the last number.
_FEW, _FEW_OF, MOST_DIGITS = 3, 32, 24

_ZEROS = re.compile(b"0+")
_OPAQUE = re.compile(b"[" + TIME + UUID + b"]+")
_COUNTED = bytes.maketrans(ADDRESS + HEX + NUMBER, b"000")

# Times that the share of one place counts beside the shares of all places in its state.
_INDIRECT_PRIOR = 8.0
# Lines among which a template is counted.
NEAR = 16


def usual_share(everywhere: Sequence[float], lines: float, bucket: int) -> float:
    """Share of all `lines`, at any place, in which something came with a count of at most this bucket.

    `everywhere` has the lines for each bucket. The share is the prior of one place.
    """
    return (sum(everywhere[: bucket + 1]) + 1) / (lines + 1)


def rare_share(low: Sequence[float], total: float, usual: float, bucket: int, prior: float) -> float:
    """The same share of the `total` of one place, for which the [`usual_share`] counts as `prior` further lines."""
    return (sum(low[: bucket + 1]) + prior * usual) / (total + prior)


def counted_share(
    low: list[int], total: float, everywhere: list[float], lines: float, count: int, prior: float
) -> float:
    """The [`rare_share`] of what came `count` times at one place; then it is counted there and everywhere."""
    bucket = count.bit_length()
    share = rare_share(low, total, usual_share(everywhere, lines, bucket), bucket, prior)
    low[bucket] += 1
    everywhere[bucket] += 1
    return share


def _state_of(low: Sequence[int], total: int) -> int:
    """The key of a place in [`IndirectShares`]."""
    new = low[0]
    return total.bit_length() << 8 | (new if new < 4 else 3 + new.bit_length())


class IndirectShares(Saved):
    """Corrects the share of one place by what came at all places in the same state, as PAQ's indirect models do.

    The state is how often anything came there, and how much of it was new: a second successor after 30 equal ones is
    much rarer than one of many successors. Mahoney 2013, *Data Compression Explained*.
    """

    __slots__ = ("_states",)

    def __init__(self) -> None:
        # State → how often something with a count in each bucket came there, and how often anything.
        self._states: dict[int, list[float]] = {}

    def share(self, low: Sequence[int], total: int, usual: float, bucket: int, prior: float) -> float:
        """The corrected [`rare_share`]; counts that this bucket came."""
        state = _state_of(low, total)
        counts = self._states.get(state)
        if counts is None:
            counts = self._states[state] = [0.0] * (BUCKETS + 1)
        alone = rare_share(low, total, usual, bucket, prior)
        corrected = (sum(counts[: bucket + 1]) + _INDIRECT_PRIOR * alone) / (counts[BUCKETS] + _INDIRECT_PRIOR)
        counts[bucket] += 1
        counts[BUCKETS] += 1
        return corrected

    def add_frequent(self, low: Sequence[int], total: int) -> None:
        """Count that something frequent came."""
        counts = self._states.get(_state_of(low, total))
        if counts is not None:
            counts[BUCKETS] += 1

    def halve(self) -> None:
        self._states = {state: [count / 2 for count in counts] for state, counts in self._states.items()}


def _excess(size: int, counts: Sequence[int], few: int) -> int:
    """Difference between a size and the greatest one that `few` had or exceeded; 0 if there is none.

    `counts` says how many had each size.
    """
    usual, longer = size, counts[size]
    if longer >= few:
        return 0
    longer += sum(counts[size + 1 :])
    while longer < few and usual > 0:
        usual -= 1
        longer += counts[usual]
    return size - usual if usual else 0


@dataclass(slots=True)
class Shape(Saved):
    """A value with all digits 0: the lines that had it, and the digits of each number; an address is one number."""

    count: int
    sizes: list[int]


@dataclass(slots=True)
class Slot(Saved):
    """The values at one word of a template.

    Args:
        born: lines of the template before the first of the slot.
        digits: number of numbers in a value → for each of them, how many had 0, 1, 2, … digits.
        longest: the same of the longest run of digits in a value.
        low, shapes_low: how often a value, or a shape, came that had a count in each bucket.
        shapes: values with all digits 0.
        values: value → count; None for identifiers, whose values are not compared.
    """

    born: int
    digits: dict[int, list[list[int]]] = field(default_factory=dict)
    longest: list[int] = field(default_factory=lambda: [0] * (MOST_DIGITS + 1))
    low: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    shapes: dict[bytes, Shape] = field(default_factory=dict)
    shapes_low: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    values: dict[bytes, int] | None = field(default_factory=dict)

    def add(self, value: bytes, count: int, lines: int) -> None:
        """Count a value that has come `count` times, after `lines` other values."""
        if self.values is None:
            return
        self.values[value] = count + 1
        is_free = count == 0 and self.low[0] > _FREE_LEAST and self.low[0] > _FREE_SHARE * lines
        if is_free or len(self.values) > _MOST_VALUES:
            self.values = None

    def shape_of(self, filled: bytes, *, is_wildcard: bool) -> Shape | None:
        """The shape of a value as in `Masked.filled`; None for a further one where there are many.

        At a wildcard, where words differ, only the numbers make the shape.
        """
        text = _OPAQUE.sub(b"?", filled).translate(_COUNTED)
        numbers = _ZEROS.findall(text)
        if is_wildcard:
            text = b" ".join(numbers)
        shape = self.shapes.get(text)
        if shape is None and len(self.shapes) < _MOST_SHAPES:
            shape = self.shapes[text] = Shape(0, [min(len(zeros), MOST_DIGITS) for zeros in numbers])
        return shape

    def excess(self, shape: Shape, longest: int, lines: int) -> int:
        """Digits that a number of a value has more than all but very few of the `lines` before.

        `longest` is as in `Layout.shapes`.
        """
        few = min(max(_FEW, lines // _FEW_OF), FREQUENT)
        highest = _excess(longest, self.longest, few) if longest else 0
        if shape.count < few:
            for size, counts in zip(shape.sizes, self.digits.get(len(shape.sizes), ()), strict=False):
                highest = max(highest, _excess(size, counts, few))
        return highest

    def add_shape(self, shape: Shape, longest: int) -> None:
        """Count a shape that is not frequent yet, and the digits of the longest run in the value."""
        shape.count += 1
        found = self.digits.get(len(shape.sizes))
        if found is None:
            found = self.digits[len(shape.sizes)] = [[0] * (MOST_DIGITS + 1) for _ in shape.sizes]
        for size, counts in zip(shape.sizes, found, strict=True):
            counts[size] += 1
        if longest:
            self.longest[longest] += 1


@dataclass(slots=True)
class Order(Saved):
    """Successors of a symbol, and how rare they and its predecessors were.

    Args:
        after: symbol → how often it came next.
        after_low, before_low: how often a successor, or a predecessor, came that had a count in each bucket.
    """

    after: dict[int, int] = field(default_factory=dict)
    after_low: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    before_low: list[int] = field(default_factory=lambda: [0] * BUCKETS)

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
