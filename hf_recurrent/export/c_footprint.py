"""Memory and arithmetic of exported C, counted before it is compiled.

Shape letters: I inputs of a linear map.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hf_recurrent.kernels.step_graph import Node

# Of Thumb-2 with -Os, measured on steps and learners: between 0.23 and 0.31, and 0.40 for mGRADE's step.
_CODE_BYTES_PER_CHARACTER = 0.26
_OPERATIONS_PER_WEIGHT = {"adamw": 14, "rmsprop": 10, "sgd": 2}  # of the update, without the norm of the gradient
_FREE_FUNCTIONS = {"copy": 0, "splat": 0, "set": 0}
_FUNCTIONS = _FREE_FUNCTIONS | {"mul_add": 2, "rsqrt": 2, "sigmoid": 4, "softplus": 3, "gelu": 5}


@dataclass(frozen=True)
class Footprint:
    """Memory and arithmetic of an exported step or learner.

    Args:
        code: bytes of machine code for Thumb-2 at -Os without the functions of libm; an estimate.
        constants: bytes of weights and tables.
        ram: bytes of the struct that the caller owns.
        stack: bytes of arrays on the stack.
        operations: additions, multiplications, divisions, comparisons and functions of one step, or of reading and
            learning one token.
    """

    code: int
    constants: int
    ram: int
    stack: int
    operations: int

    @property
    def flash(self) -> int:
        return self.code + self.constants

    @property
    def total(self) -> int:
        return self.flash + self.ram + self.stack

    def commented(self, text: str) -> str:
        """C text with the footprint as the last lines of its first comment."""
        stack = f" and {self.stack:,} of arrays on the stack" if self.stack else ""
        lines = (
            f" * Flash: {self.constants:,} bytes of weights and tables, and about {self.code / 1000:.1f} kB of code"
            " (Thumb-2, -Os, without libm).",
            f" * RAM: {self.ram:,} bytes{stack}. Arithmetic operations a token: {self.operations:,}.",
        )
        return text.replace("\n */", "\n" + "\n".join(lines) + "\n */", 1)


def code_bytes(text: str) -> int:
    """An estimate for the machine code of C text, which is given without its tables."""
    return round(len(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)) * _CODE_BYTES_PER_CHARACTER)


def graph_operations(nodes: Iterable[Node]) -> int:
    """Arithmetic operations of nodes; a multiplication with an addition is two."""
    return sum(_COUNTS[node.kind](node) for node in nodes if node.kind in _COUNTS)


def update_operations(optimizer: str, num_trained: int) -> int:
    """Arithmetic operations of an update of all weights, with the norm of their gradient."""
    return num_trained * (2 + _OPERATIONS_PER_WEIGHT[optimizer])


def rows_operations(count: int, width: int) -> int:
    """Arithmetic operations of row-wise Adagrad for `count` rows, with the check of their gradient."""
    return width * (2 * count + 3) + 4 * count


def _product(*names: str, factor: int = 1) -> Callable[[Node], int]:
    def count(node: Node) -> int:
        total = factor
        for name in names:
            total *= node.fields[name]
        return total

    return count


def _each(factor: int) -> Callable[[Node], int]:
    """`factor` operations per element of the output."""
    return lambda node: factor * node.output.width


def _linear(node: Node) -> int:
    count, width, depth = (node.fields[name] for name in ("count", "width", "depth"))
    return count * (width * (2 * depth + 3) + 6 * depth)  # int8 products, their scales, and activations as integers


def _matmul(node: Node) -> int:
    rows, depth, width = (node.fields[name] for name in ("rows", "depth", "width"))
    return rows * width * (1 if depth == 1 else 2 * depth)


def _attention(node: Node) -> int:
    heads, queries, keys, width = (node.fields[name] for name in ("heads", "queries", "keys", "width"))
    return heads * queries * keys * (4 * width + 6)


def _sensitivities(node: Node) -> int:
    channels, rows, groups, columns = (node.fields[name] for name in ("channels", "rows", "groups", "columns"))
    of_gradient = 0 if node.operands[5] is None else 2 * channels
    return rows * groups * columns * (of_gradient + channels * (2 * channels + 2))


# Kinds that only move elements are absent.
_COUNTS: dict[str, Callable[[Node], int]] = {
    "map": lambda node: node.output.width * _FUNCTIONS.get(node.fields["function"], 1),
    "embedding": _each(1),
    "linear": _linear,
    "ngrams": _each(1),
    "norm": _each(8),
    "norm_backward": _each(14),
    "reduce": _product("outer", "count", "inner"),
    "softmax": _each(5),
    "product": _product("matrices", "rows", "depth", "width", factor=2),
    "attention": _attention,
    "matmul": _matmul,
    "lookup_backward": _product("width"),
    "sensitivities": _sensitivities,
}
