"""A graph of one step as the words that step_cpu.c runs.

Element-wise nodes are put off until somebody needs one of them, and then run together, a tile of numbers at a time.
"""

import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from .step_graph import Buffer, Node, StepGraph, Value

# As in step_cpu.c.
_OPERATIONS = (
    "linear", "norm", "embedding", "copy", "gather", "map", "reduce", "softmax", "attention", "product", "quantize",
    "unchanged",
)  # fmt: skip
_FUNCTIONS = (
    "copy", "splat", "set", "add", "sub", "mul", "div", "max", "min", "add_number", "mul_number", "rsub_number",
    "at_least", "at_most", "neg", "abs", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "sigmoid",
    "tanh", "gelu", "softplus", "sin", "cos", "erf", "pow", "floor", "round", "mul_add", "where", "eq", "lt", "le",
)  # fmt: skip
_REDUCTIONS = ("sum", "mean", "maximum", "minimum")
_WEIGHT_TYPES = (None, "bfloat16", "int8")
_TEMPORARIES = 24  # MOST_TEMPORARIES
_PAIR_BLOCK = 32  # PAIR_BLOCK
_CACHE_LINE = 16  # numbers
_ABSENT = (-1, 0, 0, 0)
Place = tuple[Buffer, int]  # a buffer and the first of its numbers


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers of a weight (outputs, inputs) and their scale (outputs,), symmetric."""
    scale = weight.abs().amax(1).clamp_min(1e-30) / 127
    return (weight / scale.unsqueeze(1)).round().clamp(-127, 127).to(torch.int8), scale.float()


def pair_columns(weight: Tensor) -> Tensor:
    """bfloat16 numbers in the order in which the kernel widens them: in each block of 32 columns, 0, 16, 1, 17, …

    The last block is filled with zeros.
    """
    blocks = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, -weight.shape[1] % _PAIR_BLOCK))
    return blocks.unflatten(1, (-1, 2, _PAIR_BLOCK // 2)).transpose(2, 3).flatten(1)


class Step(NamedTuple):
    """One instruction, whose words are written when all buffers have their places.

    Args:
        operation: one of `_OPERATIONS`.
        reads, writes: buffers.
        fields: what `_Writer` needs.
    """

    operation: str
    reads: list[Buffer]
    writes: list[Buffer]
    fields: dict


class StepWords:
    """The words of a graph.

    Args:
        graph: of one step.
        outputs: name → value.
        guards: weights and copies of them, which must hold the same numbers at every step.
        weights: None, "bfloat16" or "int8": the type in which large weights are stored.

    Attributes:
        words, spans: see `hf_step_run`.
        inputs, outputs: names → numbers per stream.
        constants: tensors whose addresses follow those of scratch memory, inputs and outputs.
        converted: weights of which the program has copies.
        scratch_width: numbers of scratch memory for each stream.
    """

    operations = {name: number for number, name in enumerate(_OPERATIONS)}  # noqa: RUF012 (read only)

    def __init__(
        self,
        graph: StepGraph,
        outputs: dict[str, Value],
        guards: list[tuple[Tensor, Tensor]],
        weights: str | None = None,
    ):
        self.graph, self.weights = graph, weights
        self.converted: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.steps: list[Step] = []
        self._narrow: dict[tuple, tuple[Tensor, Tensor | None]] = {}
        self._quantized: dict[tuple, tuple[Buffer, Buffer]] = {}
        targets = {name: graph.vector(value) for name, value in outputs.items()}
        self._output_names: dict[Buffer, str] = {}
        self._copied: list[tuple[str, Place]] = []
        for name, (buffer, place) in targets.items():
            whole = not place and buffer.width == outputs[name].shape.numel()
            if whole and buffer.node is not None and buffer not in self._output_names:
                self._output_names[buffer] = name
            else:
                self._copied.append((name, (buffer, place)))
        for weight, copy in guards:
            self._emit("unchanged", [], [], weight=weight, copy=copy)
        self._schedule([buffer for buffer, _ in targets.values()])
        self.inputs = {b.name: b.width for b in graph.buffers if b.name is not None and self._is_read(b)}
        self.outputs = {name: value.shape.numel() for name, value in outputs.items()}
        self._output_buffers = {name: Buffer(width, name=f"new {name}") for name, width in self.outputs.items()}
        for name, (buffer, place) in self._copied:
            target = self._output_buffers[name]
            if not target.width:
                continue
            self._emit("copy", [buffer], [target], x=(buffer, place), to=(target, 0), width=target.width)
        self._write()

    # ---- Order of the operations

    def _schedule(self, needed: list[Buffer]) -> None:
        live: set[Node] = set()
        pending = [buffer.node for buffer in needed if buffer.node is not None]
        while pending:
            node = pending.pop()
            if node not in live:
                live.add(node)
                pending += [buffer.node for buffer, _ in filter(None, node.operands) if buffer.node is not None]
        nodes = _in_order([node for node in self.graph.nodes if node in live])
        self._users: dict[Buffer, list[Node]] = {}
        for node in nodes:
            for buffer, _ in filter(None, node.operands):
                self._users.setdefault(buffer, []).append(node)
        self._needed = set(needed)
        self._deferred: list[Node] = []
        for node in nodes:
            if node.kind == "map":
                self._deferred.append(node)
                continue
            for buffer, _ in filter(None, node.operands):
                self._flush(buffer)
            getattr(self, f"_emit_{node.kind}")(node)
        while self._deferred:
            self._flush(self._deferred[0].output)

    def _flush(self, buffer: Buffer) -> None:
        """Run the element-wise nodes that a buffer waits for, and all others of that width that can run with them."""
        if buffer.node not in self._deferred:
            return
        waiting = set(self._deferred)
        chosen: set[Node] = set()
        self._choose(buffer.node, waiting, chosen)
        for node in self._deferred:
            if node.output.width == buffer.width and node not in chosen and self._can_join(node, waiting, chosen):
                chosen.add(node)
        group = [node for node in self._deferred if node in chosen]
        self._deferred = [node for node in self._deferred if node not in chosen]
        self._emit_map(group)

    def _choose(self, node: Node, waiting: set[Node], chosen: set[Node]) -> None:
        for buffer, place in filter(None, node.operands):
            if buffer.node not in waiting or buffer.node in chosen:
                continue
            if buffer.width == node.output.width and not place:
                self._choose(buffer.node, waiting, chosen)
            else:
                self._flush(buffer)
                waiting.intersection_update(self._deferred)
        if node in waiting:
            chosen.add(node)

    def _can_join(self, node: Node, waiting: set[Node], chosen: set[Node]) -> bool:
        return all(
            buffer.node not in waiting or (buffer.node in chosen and not place and buffer.width == node.output.width)
            for buffer, place in filter(None, node.operands)
        )

    def _emit(self, operation: str, reads: list[Buffer], writes: list[Buffer], **fields) -> None:
        self.steps.append(Step(operation, reads, writes, fields))

    def _emit_map(self, group: list[Node]) -> None:
        if not group:
            return
        inside = set(group)
        stored = {
            node for node in group
            if node.output in self._needed or any(user not in inside for user in self._users.get(node.output, ()))
        }  # fmt: skip
        last = {buffer: number for number, node in enumerate(group) for buffer, _ in filter(None, node.operands)}
        free, temporary = list(range(_TEMPORARIES))[::-1], {}
        for number, node in enumerate(group):
            for buffer, _ in filter(None, node.operands):
                if buffer in temporary and last[buffer] == number and buffer.node in inside:
                    free.append(temporary[buffer])
            free = list(dict.fromkeys(free))
            if node in stored:
                continue
            if node.output not in last:
                raise AssertionError("a node that nobody reads")
            if free:
                temporary[node.output] = free.pop()
            else:
                stored.add(node)
        reads = [buffer for node in group for buffer, _ in filter(None, node.operands) if buffer.node not in inside]
        self._emit("map", reads, [node.output for node in group if node in stored], group=group, temporary=temporary)

    def _emit_move(self, node: Node) -> None:
        for (buffer, place), tables, start, width in node.fields["pieces"]:
            if tables is None:
                fields = {"x": (buffer, place), "to": (node.output, start), "width": width}
                self._emit("copy", [buffer], [node.output], **fields)
            else:
                fields = {"x": (buffer, place), "to": (node.output, 0), "width": width, "tables": tables}
                self._emit("gather", [buffer], [node.output], **fields)

    def _emit_simple(self, node: Node) -> None:
        reads = [buffer for buffer, _ in filter(None, node.operands)]
        self._emit(node.kind, reads, [node.output], node=node)

    _emit_norm = _emit_reduce = _emit_softmax = _emit_product = _emit_embedding = _emit_simple

    def _emit_attention(self, node: Node) -> None:
        scores = Buffer(node.fields["keys"])
        reads = [buffer for buffer, _ in filter(None, node.operands)]
        self._emit("attention", reads, [node.output, scores], node=node, scores=scores)

    def _emit_linear(self, node: Node) -> None:
        (buffer, place), bias = node.operands
        reads, fields = [buffer] + ([bias[0]] if bias else []), {"node": node, "x": (buffer, place), "x_scale": None}
        if self.weights == "int8":
            count, depth = node.fields["count"], node.fields["depth"]
            key = (buffer, place, count, depth)
            if key not in self._quantized:
                numbers, scale = Buffer(-(-count * depth // 2)), Buffer(count)
                self._quantized[key] = numbers, scale
                fields_of = {"x": (buffer, place), "to": (numbers, 0), "scale": (scale, 0), "count": count}
                self._emit("quantize", [buffer], [numbers, scale], width=depth, **fields_of)
            numbers, scale = self._quantized[key]
            reads, fields = [*reads[1:], numbers, scale], {"node": node, "x": (numbers, 0), "x_scale": (scale, 0)}
        self._emit("linear", reads, [node.output], **fields)

    def _is_read(self, buffer: Buffer) -> bool:
        copied = [place[0] for _, place in self._copied]
        return buffer in copied or any(buffer in step.reads for step in self.steps)

    # ---- Places and words

    def _write(self) -> None:
        self._bases = {f"in {name}": 1 + number for number, name in enumerate(self.inputs)}
        self._bases |= {f"out {name}": 1 + len(self.inputs) + number for number, name in enumerate(self.outputs)}
        self._first_constant = 1 + len(self.inputs) + len(self.outputs)
        self._constant_places: dict[int, int] = {}
        spans = self._chain_spans()
        self._allocate(spans)
        self.words: list[int] = []
        starts = []
        for step in self.steps:
            starts.append(len(self.words))
            words = getattr(self, f"_write_{step.operation}")(**step.fields)
            self.words += [self.operations[step.operation], len(words) + 2, *words]
        starts.append(len(self.words))
        self.spans = [(starts[begin], starts[end], int(by_row)) for begin, end, by_row in spans]

    def _chain_spans(self) -> list[tuple[int, int, bool]]:
        """Spans of steps; true where a chain of steps of one stream has to take them row by row."""
        inside = [0] * (len(self.steps) + 1)
        by_name = {name: buffer for buffer, name in self._output_names.items()}
        for name in self.outputs:
            written = by_name.get(name, self._output_buffers[name])
            readers = [n for n, step in enumerate(self.steps) for b in step.reads if b.name == name]
            writers = [n for n, step in enumerate(self.steps) if written in step.writes]
            if readers and writers and (readers[0] < writers[-1] or self._mixes_rows(readers[0], writers[-1])):
                for number in range(readers[0], writers[-1] + 1):
                    inside[number] = 1
        spans, begin = [], 0
        for number in range(1, len(self.steps) + 1):
            if number == len(self.steps) or inside[number] != inside[begin]:
                spans.append((begin, number, bool(inside[begin])))
                begin = number
        return spans

    def _mixes_rows(self, reader: int, writer: int) -> bool:
        return reader == writer and self.steps[reader].operation == "linear"

    def _allocate(self, spans: list[tuple[int, int, bool]]) -> None:
        """Scratch memory: a buffer's place is free again after its last reader, in a chain's span after the span."""
        end_of = {n: (end - 1 if by_row else n) for begin, end, by_row in spans for n in range(begin, end)}
        last: dict[Buffer, int] = {}
        for number, step in enumerate(self.steps):
            for buffer in (*step.reads, *step.writes):
                last[buffer] = max(last.get(buffer, 0), end_of[number])
        self._places: dict[Buffer, int] = {}
        free: list[tuple[int, int]] = []
        expiring: dict[int, list[Buffer]] = {}
        self.scratch_width = 0
        for number, step in enumerate(self.steps):
            for buffer in step.writes:
                if self._is_named(buffer) or buffer in self._places:
                    continue
                size = -(-buffer.width // _CACHE_LINE) * _CACHE_LINE
                fitting = min((hole for hole in free if hole[1] >= size), key=lambda hole: hole[1], default=None)
                if fitting is None:
                    self._places[buffer] = self.scratch_width
                    self.scratch_width += size
                else:
                    free.remove(fitting)
                    self._places[buffer] = fitting[0]
                    if fitting[1] > size:
                        free.append((fitting[0] + size, fitting[1] - size))
                expiring.setdefault(last[buffer], []).append(buffer)
            for buffer in expiring.pop(number, ()):
                free.append((self._places[buffer], -(-buffer.width // _CACHE_LINE) * _CACHE_LINE))
            free = _merged(free)

    def _is_named(self, buffer: Buffer) -> bool:
        return buffer in self._output_names or buffer.name is not None

    def _constant(self, tensor: Tensor) -> int:
        """The base of a constant."""
        if tensor.data_ptr() not in self._constant_places:
            self._constant_places[tensor.data_ptr()] = self._first_constant + len(self.constants)
            self.constants.append(tensor)
        return self._constant_places[tensor.data_ptr()]

    def _operand(self, place: Place | None) -> tuple[int, int, int, int]:
        if place is None:
            return _ABSENT
        buffer, first = place
        if buffer.constant is not None:
            return self._constant(buffer.constant), 0, first, 0
        if buffer in self._output_names:
            return self._bases[f"out {self._output_names[buffer]}"], 0, first, buffer.width
        if buffer.name is not None:
            name = f"out {buffer.name[4:]}" if buffer.name.startswith("new ") else f"in {buffer.name}"
            return self._bases[name], 0, first, buffer.width
        return 0, self._places[buffer], first, buffer.width

    def _table(self, tensor: Tensor | None) -> tuple[int, int, int, int]:
        return _ABSENT if tensor is None else (self._constant(tensor), 0, 0, 0)

    def _weight(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """A weight in the type of the program, and its scale."""
        if self.weights is None:
            return weight, None
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if key not in self._narrow:
            self.converted.append(weight)
            if self.weights == "int8":
                self._narrow[key] = quantize_rows(weight)
            else:
                self._narrow[key] = pair_columns(weight), None
        return self._narrow[key]

    def _write_linear(self, node: Node, x: Place, x_scale: Place | None) -> list[int]:
        width, depth = node.fields["weight"].shape
        weight, scale = self._weight(node.fields["weight"])
        pitch = weight.stride(0) if width > 1 else depth
        bias = self._operand(node.operands[1])
        words = [node.fields["count"], width, depth, pitch, _WEIGHT_TYPES.index(self.weights), *self._table(weight)]
        words += [*self._table(scale), *bias, *self._operand(x), *self._operand((node.output, 0))]
        return [*words, *self._operand(x_scale)]

    def _write_norm(self, node: Node) -> list[int]:
        x, weight, bias = map(self._operand, node.operands)
        width = node.fields["width"]
        words = [node.output.width // width, width, int(node.fields["center"]), _bits(node.fields["eps"])]
        return [*words, *weight, *bias, *x, *self._operand((node.output, 0))]

    def _write_embedding(self, node: Node) -> list[int]:
        table, scale = self._weight(node.fields["weight"])
        words = [node.fields["width"], table.stride(0), _WEIGHT_TYPES.index(self.weights)]
        words += [*self._table(table), *self._table(scale)]
        return [*words, *self._operand(node.operands[0]), *self._operand((node.output, 0))]

    def _write_copy(self, x: Place, to: Place, width: int) -> list[int]:
        return [width, *self._operand(x), *self._operand(to)]

    def _write_gather(self, x: Place, to: Place, width: int, tables: tuple) -> list[int]:
        run = _common_run(*tables)
        index, to_index = (None if table is None else table[::run].contiguous() for table in tables)
        return [width // run, run, *self._table(index), *self._table(to_index), *self._operand(x), *self._operand(to)]

    def _write_map(self, group: list[Node], temporary: dict[Buffer, int]) -> list[int]:
        operands: list[tuple] = []
        written: list[tuple[Node, list]] = []

        def number(place: Place | None):
            if place is None:
                return -1
            if place[0] in temporary:
                return ("temporary", temporary[place[0]])
            operand = self._operand(place)
            if operand not in operands:
                operands.append(operand)
            return operands.index(operand)

        for node in group:
            inputs = [number(place) for place in node.operands]
            written.append((node, [number((node.output, 0)), *inputs, *[-1] * (3 - len(inputs))]))
        words = [group[0].output.width, 0, len(group)]
        functions = []
        for node, places in written:
            resolved = [len(operands) + p[1] if isinstance(p, tuple) else p for p in places]
            functions += [_FUNCTIONS.index(node.fields["function"]), *resolved, _bits(node.fields["number"])]
        words[1] = len(operands)
        return words + [word for operand in operands for word in operand] + functions

    def _write_reduce(self, node: Node) -> list[int]:
        f = node.fields
        words = [f["outer"], f["count"], f["inner"], _REDUCTIONS.index(f["reduction"])]
        return [*words, *self._operand(node.operands[0]), *self._operand((node.output, 0))]

    def _write_softmax(self, node: Node) -> list[int]:
        words = [node.fields["rows"], node.fields["width"]]
        return [*words, *self._operand(node.operands[0]), *self._operand((node.output, 0))]

    def _write_attention(self, node: Node, scores: Buffer) -> list[int]:
        f = node.fields
        words = [f["heads"], f["queries"], f["keys"], f["width"], int(f["causal"]), _bits(f["scale"])]
        operands = [*node.operands, (scores, 0), (node.output, 0)]
        return words + [word for place in operands for word in self._operand(place)]

    def _write_product(self, node: Node) -> list[int]:
        f = node.fields
        words = [f["matrices"], f["rows"], f["depth"], f["width"]]
        return words + [word for place in (*node.operands, (node.output, 0)) for word in self._operand(place)]

    def _write_quantize(self, x: Place, to: Place, scale: Place, count: int, width: int) -> list[int]:
        return [count, width, *self._operand(x), *self._operand(to), *self._operand(scale)]

    def _write_unchanged(self, weight: Tensor, copy: Tensor) -> list[int]:
        return [weight.nbytes, *self._table(weight), *self._table(copy)]


def _common_run(index: Tensor, to_index: Tensor | None) -> int:
    """The largest number of successive places that all runs of a gather are multiples of."""
    breaks = index.diff() != 1
    if to_index is not None:
        breaks |= to_index.diff() != 1
    starts = (breaks.nonzero().flatten() + 1).tolist()
    return math.gcd(*starts, len(index))


def _in_order(nodes: list[Node]) -> list[Node]:
    """Nodes in the order of `forward`, but moves as soon as they can run: a state's old and new memory are then used
    close to one another."""
    done: set[Node] = set()
    kept = set(nodes)
    ordered: list[Node] = []
    moves = [node for node in nodes if node.kind == "move"]
    for node in nodes:
        if node in done:
            continue
        ordered.append(node)
        done.add(node)
        for move in moves:
            sources = [buffer.node for buffer, _ in filter(None, move.operands)]
            if move not in done and all(source is None or source in done or source not in kept for source in sources):
                ordered.append(move)
                done.add(move)
    return ordered


def _merged(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for place, size in sorted(holes):
        if merged and sum(merged[-1]) == place:
            merged[-1] = merged[-1][0], merged[-1][1] + size
        else:
            merged.append((place, size))
    return merged


def _bits(number: float) -> int:
    return struct.unpack("=q", struct.pack("=d", float(number)))[0]
