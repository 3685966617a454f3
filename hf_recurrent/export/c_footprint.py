"""Memory and arithmetic of exported C, counted before it is compiled.

Shape letters: I inputs of a linear map.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hf_recurrent.kernels.step_graph import Node

# Of Thumb-2 with -Os, measured on steps and learners: between 0.23 and 0.31, and 0.40 for mGRADE's step.
_CODE_BYTES_PER_CHARACTER = 0.26
_OPERATIONS_PER_WEIGHT = {"adamw": 14, "rmsprop": 10, "sgd": 2}  # of the update, without the norm of the gradient
_FUNCTIONS = {"copy": 0, "splat": 0, "set": 0, "mul_add": 2, "rsqrt": 2, "sigmoid": 4, "softplus": 3, "gelu": 5}


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
    return sum(map(_operations, nodes))


def _operations(node: Node) -> int:
    f, each = node.fields, node.output.width
    match node.kind:
        case "map":
            return each * _FUNCTIONS.get(f["function"], 1)
        case "embedding" | "ngrams":
            return each
        case "linear":  # int8 products, their scales, and activations as integers
            return f["count"] * (f["width"] * (2 * f["depth"] + 3) + 6 * f["depth"])
        case "norm":
            return 8 * each
        case "norm_backward":
            return 14 * each
        case "reduce":
            return f["outer"] * f["count"] * f["inner"]
        case "softmax":
            return 5 * each
        case "product":
            return 2 * f["matrices"] * f["rows"] * f["depth"] * f["width"]
        case "attention":
            return f["heads"] * f["queries"] * f["keys"] * (4 * f["width"] + 6)
        case "matmul":
            return f["rows"] * f["width"] * (1 if f["depth"] == 1 else 2 * f["depth"])
        case "lookup_backward":
            return f["width"]
        case "sensitivities":
            of_gradient = 0 if node.operands[5] is None else 2 * f["channels"]
            each_row = of_gradient + f["channels"] * (2 * f["channels"] + 2)
            return f["rows"] * f["groups"] * f["columns"] * each_row
    return 0  # only moves elements


def update_operations(optimizer: str, num_trained: int) -> int:
    """Arithmetic operations of an update of all weights, with the norm of their gradient."""
    return num_trained * (2 + _OPERATIONS_PER_WEIGHT[optimizer])


def rows_operations(count: int, width: int) -> int:
    """Arithmetic operations of row-wise Adagrad for `count` rows, with the check of their gradient."""
    return width * (2 * count + 3) + 4 * count
