"""A graph of a step or block as the bytecode that step_cpu.c runs: instructions, memory and addresses."""

import math
import struct
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from .functions import FUNCTION_OPCODES
from .schedule import Schedule
from .step_graph import Buffer, Node, Slice, StepGraph, UnsupportedOp, Value
from .weight_rows import WEIGHT_TYPES, pair_columns, quantize_rows

# enum opcode in bytecode.h.
STEP_OPCODES = (
    "linear", "norm", "embedding", "copy", "gather", "map", "reduce", "softmax", "attention", "product", "quantize",
    "unchanged", "token", "ngrams",
)  # fmt: skip
# Of one stream only.
BLOCK_OPCODES = (
    "matmul", "broadcast", "scan", "scan_backward", "norm_backward", "nll_loss", "nll_loss_backward", "lookup",
    "lookup_backward", "sensitivities", "finite",
)  # fmt: skip
_OPCODES = {name: opcode for opcode, name in enumerate((*STEP_OPCODES, *BLOCK_OPCODES))}
_REDUCTIONS = ("sum", "mean", "maximum", "minimum")  # enum reduction
# Fields of a node that come first in the struct of its instruction; the operands follow, and the result.
_FIELDS = {
    "norm": ("count", "width", "center", "eps"),
    "reduce": ("outer", "count", "inner", "reduction"),
    "softmax": ("rows", "width"),
    "attention": ("heads", "queries", "keys", "width", "causal", "scale"),
    "product": ("matrices", "rows", "depth", "width"),
    "matmul": ("rows", "depth", "width", "a_row", "a_depth", "b_depth", "b_width"),
    "broadcast": ("outer", "count", "inner"),
    "scan": ("steps", "width"),
    "scan_backward": ("steps", "width"),
    "norm_backward": ("count", "width", "eps"),
    "nll_loss": ("steps", "width", "one_grad"),
    "nll_loss_backward": ("steps", "width", "one_grad"),
    "lookup": ("steps", "height", "width"),
    "token": (),
    "lookup_backward": ("steps", "height", "width"),
    "sensitivities": ("steps", "channels", "rows", "groups", "columns"),
    "finite": (),
}
_DOUBLES = {"eps", "scale"}
_MAX_LANES = 16  # of a vector of the kernel
_CACHE_LINE = 16  # elements
_ABSENT = (-1, 0, 0, 0)
Operand = Slice | Tensor | None  # of each stream, the same for all, or absent


class Instruction(NamedTuple):
    """One instruction, which is encoded when all buffers have their memory.

    Args:
        opcode: name of the operation.
        fields: integers, and floats for fields of type double.
        inputs, outputs: operands in the order of the struct in bytecode.h.
        maps: the nodes of a map, and the temporary of each result that has one.
    """

    opcode: str
    fields: Sequence[int | float]
    inputs: Sequence[Operand]
    outputs: Sequence[Slice | None]
    maps: tuple[list[Node], dict[Buffer, int]] | None = None

    def reads(self) -> list[Buffer]:
        return [operand[0] for operand in self.inputs if isinstance(operand, tuple)]

    def writes(self) -> list[Buffer]:
        return [operand[0] for operand in self.outputs if operand is not None]


class Bytecode:
    """The bytecode of a graph.

    Args:
        graph: of one step, or of one block of one stream.
        outputs: name → value.
        guards: weights and copies of them, which must hold the same values at every run.
        weights: None, "bfloat16" or "int8": the type in which large weights are stored.
        effects: buffers of nodes that run for their side effects; given for a block, None for a step.

    Attributes:
        code: the instructions.
        segments: (begin, end, by_row) of parts of the code; a chain runs a part with `by_row` step by step.
        inputs, outputs: name → elements per stream; "ids" is the first input, if it is one.
        constants: tensors whose addresses follow the addresses of scratch memory, inputs and outputs.
        converted: weights of which the program has copies.
        scratch_width: elements of scratch memory for each stream.

    Raises:
        UnsupportedOp: a step has a node that only blocks can run.
    """

    def __init__(
        self,
        graph: StepGraph,
        outputs: dict[str, Value],
        guards: list[tuple[Tensor, Tensor]],
        weights: str | None = None,
        effects: Iterable[Buffer] | None = None,
    ):
        self.graph, self.weights, self.is_block = graph, weights, effects is not None
        self.converted: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.instructions: list[Instruction] = []
        self._narrow: dict[tuple, tuple[Tensor, Tensor | None]] = {}
        self._quantized: dict[tuple, tuple[Buffer, Buffer]] = {}
        targets = {name: graph.vector(value) for name, value in outputs.items()}
        self._output_names: dict[Buffer, str] = {}  # of buffers that are outputs as they are
        copied: list[tuple[str, Slice]] = []
        for name, (buffer, offset) in targets.items():
            whole = not offset and buffer.width == outputs[name].shape.numel()
            if whole and buffer.node is not None and buffer not in self._output_names:
                self._output_names[buffer] = name
            else:
                copied.append((name, (buffer, offset)))
        for weight, copy in guards:
            self._emit("unchanged", [weight.nbytes], [weight, copy], [])
        Schedule(
            graph, [*(buffer for buffer, _ in targets.values()), *(effects or ())], self._emit_node, self._emit_maps
        )
        read = {buffer for one in self.instructions for buffer in one.reads()} | {source[0] for _, source in copied}
        named = sorted((b for b in graph.buffers if b.name is not None and b in read), key=lambda b: b.name != "ids")
        self.inputs = {buffer.name: buffer.width for buffer in named}
        self.outputs = {name: value.shape.numel() for name, value in outputs.items()}
        self._copies = {name: Buffer(width) for name, width in self.outputs.items()}
        for name, source in copied:
            target = self._copies[name]
            self._output_names[target] = name
            if target.width:
                self._emit("copy", [target.width], [source], [(target, 0)])
        self._encode()

    # ---- Instructions

    def _emit(self, opcode: str, fields: Sequence, inputs: Sequence[Operand], outputs: Sequence[Slice | None]) -> None:
        self.instructions.append(Instruction(opcode, fields, inputs, outputs))

    def _emit_node(self, node: Node) -> None:
        if node.kind in BLOCK_OPCODES and not self.is_block:
            raise UnsupportedOp(f"{node.kind} in a single step")
        if node.kind in ("embedding", "token") and (
            node.operands[0][0].name != "ids" or node.operands[0][0].width != 1
        ):
            raise UnsupportedOp(f"{node.kind} of something else than the token")
        special = getattr(self, f"_emit_{node.kind}", None)
        if special is not None:
            special(node)
            return
        fields = dict(node.fields)
        if node.kind == "norm":
            fields["count"] = node.output.width // fields["width"]
        if node.kind == "reduce":
            fields["reduction"] = _REDUCTIONS.index(fields["reduction"])
        fields |= {name: float(fields[name]) for name in _DOUBLES & fields.keys()}
        in_order = [fields.get(name, 0) for name in _FIELDS[node.kind]]
        self._emit(node.kind, in_order, node.operands, self._results(node))

    def _results(self, node: Node) -> list[Slice | None]:
        """The result, and memory that only this instruction uses."""
        results: list[Slice | None] = [(node.output, 0)]
        if node.kind == "attention":
            results.insert(0, (Buffer(node.fields["keys"]), 0))
        elif node.kind == "matmul":
            packs = node.fields["b_width"] != 1
            results.append((Buffer(node.fields["depth"] * (node.fields["rows"] + _MAX_LANES) if packs else 0), 0))
        elif node.kind == "sensitivities" and node.operands[4] is None:
            results = [None]  # no gradient
        elif node.kind == "finite":
            results = []
        return results

    def _emit_maps(self, group: list[Node], temporary: dict[Buffer, int]) -> None:
        inside = {node.output for node in group}
        reads = [operand for node in group for operand in filter(None, node.operands) if operand[0] not in inside]
        writes = [(node.output, 0) for node in group if node.output not in temporary]
        self.instructions.append(Instruction("map", [group[0].output.width], reads, writes, (group, temporary)))

    def _emit_move(self, node: Node) -> None:
        for source, tables, start, width in node.fields["pieces"]:
            if tables is None:
                self._emit("copy", [width], [source], [(node.output, start)])
                continue
            run = _common_run(*tables)
            index, to_index = (None if table is None else table[::run].contiguous() for table in tables)
            self._emit("gather", [width // run, run], [index, to_index, source], [(node.output, 0)])

    def _emit_linear(self, node: Node) -> None:
        x, bias = node.operands
        x_scale = None
        count, (width, depth) = node.fields["count"], node.fields["weight"].shape
        if self.weights == "int8":
            key = (*x, count, depth)
            if key not in self._quantized:
                values, scale = self._quantized[key] = Buffer(-(-count * depth // 2)), Buffer(count)
                self._emit("quantize", [count, depth], [x], [(values, 0), (scale, 0)])
            x, x_scale = ((buffer, 0) for buffer in self._quantized[key])
        weight, scale = self._weight(node.fields["weight"])
        pitch = weight.stride(0) if width > 1 else depth
        fields = [count, width, depth, pitch, WEIGHT_TYPES.index(self.weights)]
        self._emit("linear", fields, [weight, scale, bias, x, x_scale], [(node.output, 0)])

    def _emit_embedding(self, node: Node) -> None:
        table, scale = self._weight(node.fields["weight"])
        fields = [node.fields["width"], table.stride(0), WEIGHT_TYPES.index(self.weights)]
        self._emit("embedding", fields, [table, scale, *node.operands], [(node.output, 0)])

    def _emit_ngrams(self, node: Node) -> None:
        factors, orders = (torch.tensor(node.fields[name]) for name in ("factors", "orders"))
        windows, *table = node.operands
        scale, pitch = None, node.fields["width"]
        if not table:
            weight, scale = self._weight(node.fields["weight"])
            table, pitch = [weight], weight.stride(0)
        fields = [node.fields["width"], pitch, WEIGHT_TYPES.index(self.weights)]
        fields += [node.fields["steps"], len(orders), node.fields["rows"], len(factors)]
        self._emit("ngrams", fields, [*table, scale, factors, orders, windows], [(node.output, 0)])

    def _weight(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """A weight in the type of the program, and its scale."""
        if self.weights is None:
            return weight, None
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if key not in self._narrow:
            self.converted.append(weight)
            if self.weights == "int8":
                values, scale = quantize_rows(weight)
                self._narrow[key] = values, scale.flatten()
            else:
                self._narrow[key] = pair_columns(weight), None
        return self._narrow[key]

    # ---- Segments and memory

    def _segments(self) -> list[tuple[int, int, bool]]:
        """Segments of instructions; true where a chain of steps of one stream has to take them row by row."""
        count = len(self.instructions)
        inside = [False] * count
        written = {name: buffer for buffer, name in self._output_names.items()}
        for name in () if self.is_block else self.outputs:
            readers = [n for n, one in enumerate(self.instructions) for b in one.reads() if b.name == name]
            writers = [n for n, one in enumerate(self.instructions) if written[name] in one.writes()]
            if not readers or not writers:
                continue
            first, last = readers[0], writers[-1]
            mixes_rows = first == last and self.instructions[first].opcode == "linear"
            if first < last or mixes_rows:
                inside[first : last + 1] = [True] * (last + 1 - first)
        segments = [(by_row, list(numbers)) for by_row, numbers in groupby(range(count), inside.__getitem__)]
        return [(numbers[0], numbers[-1] + 1, by_row) for by_row, numbers in segments]

    def _allocate(self, segments: list[tuple[int, int, bool]]) -> None:
        """Scratch memory: a buffer's memory is free again after its last reader, or after the segment of a chain."""
        end_of = {n: (end - 1 if by_row else n) for begin, end, by_row in segments for n in range(begin, end)}
        last: dict[Buffer, int] = {}
        for number, one in enumerate(self.instructions):
            for buffer in (*one.reads(), *one.writes()):
                last[buffer] = max(last.get(buffer, 0), end_of[number])
        self._offsets: dict[Buffer, int] = {}
        free: list[tuple[int, int]] = []
        expiring: dict[int, list[Buffer]] = {}
        self.scratch_width = 0
        for number, one in enumerate(self.instructions):
            for buffer in one.writes():
                if buffer in self._output_names or buffer in self._offsets:
                    continue
                size = _padded(buffer.width)
                fitting = min((hole for hole in free if hole[1] >= size), key=lambda hole: hole[1], default=None)
                if fitting is None:
                    self._offsets[buffer] = self.scratch_width
                    self.scratch_width += size
                else:
                    free.remove(fitting)
                    self._offsets[buffer] = fitting[0]
                    if fitting[1] > size:
                        free.append((fitting[0] + size, fitting[1] - size))
                expiring.setdefault(last[buffer], []).append(buffer)
            for buffer in expiring.pop(number, ()):
                free.append((self._offsets[buffer], _padded(buffer.width)))
            free = _merged(free)

    # ---- Encoding

    def _encode(self) -> None:
        names = [*(f"in {name}" for name in self.inputs), *(f"out {name}" for name in self.outputs)]
        self._bases = {name: base for base, name in enumerate(names, 1)}  # scratch memory is base 0
        self._constant_bases: dict[int, int] = {}
        segments = self._segments()
        self._allocate(segments)
        self.code: list[int] = []
        starts = []
        for one in self.instructions:
            starts.append(len(self.code))
            if one.maps is None:
                words = [_bits(x) if isinstance(x, float) else int(x) for x in one.fields]
                words += [word for operand in (*one.inputs, *one.outputs) for word in self._operand(operand)]
            else:
                words = self._encode_maps(*one.maps)
            self.code += [_OPCODES[one.opcode], len(words) + 2, *words]
        starts.append(len(self.code))
        self.segments = [(starts[begin], starts[end], int(by_row)) for begin, end, by_row in segments]

    def _encode_maps(self, group: list[Node], temporary: dict[Buffer, int]) -> list[int]:
        slices = [operand for node in group for operand in ((node.output, 0), *node.operands)]
        in_memory = list(dict.fromkeys(self._operand(s) for s in slices if s and s[0] not in temporary))

        def number(operand: Slice | None) -> int:
            if operand is None:
                return -1
            if operand[0] in temporary:
                return len(in_memory) + temporary[operand[0]]
            return in_memory.index(self._operand(operand))

        words = [group[0].output.width, len(in_memory), len(group)]
        words += [word for operand in in_memory for word in operand]
        for node in group:
            operands = [*map(number, node.operands), *[-1] * (3 - len(node.operands))]
            opcode = FUNCTION_OPCODES[node.fields["function"]]
            words += [opcode, number((node.output, 0)), *operands, _bits(node.fields["scalar"])]
        return words

    def _operand(self, operand: Operand) -> tuple[int, int, int, int]:
        """`struct operand`: base, multiple of the number of streams, offset, stride."""
        if operand is None:
            return _ABSENT
        if isinstance(operand, Tensor):
            return self._constant(operand), 0, 0, 0
        buffer, offset = operand
        if buffer.constant is not None:
            return self._constant(buffer.constant), 0, offset, 0
        if buffer in self._output_names:
            return self._bases[f"out {self._output_names[buffer]}"], 0, offset, buffer.width
        if buffer.name is not None:
            return self._bases[f"in {buffer.name}"], 0, offset, buffer.width
        return 0, self._offsets[buffer], offset, buffer.width

    def _constant(self, tensor: Tensor) -> int:
        """The base of a constant."""
        if tensor.data_ptr() not in self._constant_bases:
            self._constant_bases[tensor.data_ptr()] = 1 + len(self._bases) + len(self.constants)
            self.constants.append(tensor)
        return self._constant_bases[tensor.data_ptr()]


def _common_run(index: Tensor, to_index: Tensor | None) -> int:
    """The largest number of successive elements of which all runs of a gather are multiples."""
    breaks = index.diff() != 1
    if to_index is not None:
        breaks |= to_index.diff() != 1
    starts = (breaks.nonzero().flatten() + 1).tolist()
    return math.gcd(*starts, len(index))


def _padded(width: int) -> int:
    return -(-width // _CACHE_LINE) * _CACHE_LINE


def _merged(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for offset, size in sorted(holes):
        if merged and sum(merged[-1]) == offset:
            merged[-1] = merged[-1][0], merged[-1][1] + size
        else:
            merged.append((offset, size))
    return merged


def _bits(value: float) -> int:
    return struct.unpack("=q", struct.pack("=d", float(value)))[0]
