"""Values of a step in C: elements at addresses, combined element by element, and the loops that compute them.

As in a StepGraph, operations that only move elements apply to tensors of addresses, so that they take no time and no
memory in C.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_recurrent.kernels.step_graph import ADDRESS_BITS

ZERO = -1  # the address of an element that is 0
_MOST_LOOPS = 24  # for one statement; beyond it, offsets are read from a table


@dataclass(frozen=True)
class Expression:
    """C text with a placeholder {k} for each tensor of addresses; `shape` is the shape of all of them."""

    shape: torch.Size
    text: str
    leaves: tuple[Tensor, ...] = ()

    def move(self, operation: Callable[[Tensor], Tensor]) -> "Expression":
        """The value after an operation that only moves, repeats or drops elements."""
        leaves = tuple(operation(leaf) for leaf in self.leaves)
        shape = leaves[0].shape if leaves else operation(torch.zeros(self.shape, dtype=torch.int64)).shape
        return Expression(shape, self.text, leaves)


def leaf(addresses: Tensor) -> Expression:
    """Elements at addresses."""
    return Expression(addresses.shape, "{0}", (addresses,))


def combine(template: str, operands: list[Expression]) -> Expression:
    """Element-wise C of several values, which broadcast as in torch."""
    shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
    texts, leaves = [], []
    for operand in operands:
        offset = len(leaves)
        texts.append(re.sub(r"\{(\d+)\}", lambda match, o=offset: f"{{{int(match[1]) + o}}}", operand.text))
        leaves += [addresses.expand(shape) for addresses in operand.leaves]
    text = re.sub(r"\{(\d+)\}", lambda match: texts[int(match[1])], template)
    return Expression(shape, text, tuple(leaves))


@dataclass
class Loop:
    """`rows` × `columns` elements; addresses of leaf k are first[k] + row_step[k]·row + step[k]·column."""

    columns: int
    first: list[int]
    step: list[int]
    row_step: list[int]
    rows: int = 1


def find_loops(leaves: list[Tensor]) -> list[Loop] | None:
    """Loops over all elements in order, in which every leaf is affine; None where there would be too many."""
    addresses = torch.stack([addresses.reshape(-1) for addresses in leaves])
    runs: list[Loop] = []
    count, begin = addresses.shape[1], 0
    steps = addresses.diff(dim=1)
    same_buffer = ((addresses[:, 1:] >> ADDRESS_BITS) == (addresses[:, :-1] >> ADDRESS_BITS)).all(0)
    turns = torch.ones(max(count - 1, 0), dtype=torch.bool)
    turns[1:] = (steps[:, 1:] != steps[:, :-1]).any(0)
    while begin < count:
        end = begin + 1
        if end < count and bool(same_buffer[begin]):
            stops = (turns[begin + 1 :] | ~same_buffer[begin + 1 :]).nonzero()
            end = begin + 2 + int(stops[0]) if len(stops) else count
        step = steps[:, begin].tolist() if end - begin > 1 else [0] * len(leaves)
        runs.append(Loop(end - begin, addresses[:, begin].tolist(), step, [0] * len(leaves)))
        begin = end
        if len(runs) > 64 * _MOST_LOOPS:
            return None
    loops = _merge(runs)
    return loops if len(loops) <= _MOST_LOOPS else None


def _merge(runs: list[Loop]) -> list[Loop]:
    """Equal runs at equal distances as one loop over rows."""
    loops: list[Loop] = []
    for run in runs:
        last = loops[-1] if loops else None
        if last is not None and (last.columns, last.step) == (run.columns, run.step):
            distance = [
                b - a - s * (last.rows - 1) for a, b, s in zip(last.first, run.first, last.row_step, strict=True)
            ]
            buffers = all(a >> ADDRESS_BITS == b >> ADDRESS_BITS for a, b in zip(last.first, run.first, strict=True))
            if buffers and (last.rows == 1 or distance == last.row_step):
                last.row_step = distance
                last.rows += 1
                continue
        loops.append(run)
    return loops


def offset_text(first: int, row_step: int, step: int) -> str:
    """C text of an offset in a loop with the counters `row` and `i`."""
    terms = [f"{step} * i" if step != 1 else "i"] if step else []
    if row_step:
        terms.insert(0, f"{row_step} * row" if row_step != 1 else "row")
    if first or not terms:
        terms.insert(0, str(first))
    return " + ".join(terms).replace("+ -", "- ")


def bare(text: str) -> str:
    """The text without parentheses around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if at == len(text) - 1 else text
    return text


def loop_text(loop: Loop, statement: str) -> str:
    """The loop in C, with the counters `row` and `i`."""
    if loop.columns == 1 and loop.rows == 1:
        return statement
    if loop.rows == 1:
        return f"for (int i = 0; i < {loop.columns}; i++) {statement}"
    inner = f"for (int i = 0; i < {loop.columns}; i++) {statement}" if loop.columns > 1 else statement
    return f"for (int row = 0; row < {loop.rows}; row++) {inner}"
