"""The graph of a block of one byte, forward and backward pass, as statements of C99 with weights that change."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_recurrent.export.c_loops import Expression, leaf
from hf_recurrent.export.c_printer import CPrinter, Memory
from hf_recurrent.export.c_tables import literal
from hf_recurrent.kernels.step_graph import Buffer, Node, Slice, StepGraph, UnsupportedOp, Value

if TYPE_CHECKING:
    from hf_recurrent.export.c_learner_plan import LearnerPlan

MOST_CHANNELS = 4  # of a group


class LearnerPrinter(CPrinter):
    """Prints a graph of a learner.

    Args:
        graph: of one byte, with the inputs `ids`, `labels`, `state NAME`, `carried NAME` and the names of `inputs`.
        plan: of the learner's memory.
        inputs: name of a further input → C text of its element, with {} for the offset.
        first_table: number of the first constant array, so that two graphs have arrays of different names.
    """

    def __init__(self, graph: StepGraph, plan: "LearnerPlan", inputs: Mapping[str, str], first_table: int = 0):
        super().__init__(graph, {}, first_table)
        weights = ((plan.parameters[name].detach(), offset) for name, offset in plan.offsets.items())
        self._parameters = {weight.data_ptr(): (weight, offset) for weight, offset in weights}
        self._num_fixed = plan.num_fixed
        self._weights: dict[int, Memory] = {}
        self._plain: set[int] = set()
        self._targets: dict[Buffer, Memory] = {}  # results that are written where a gradient lies
        self._added_rows: set[Buffer] = set()  # gradients of an embedding that are added to such a result
        texts = {name: f"learner->saved.{field}[{{}}]" for name, (field, _) in plan.fields.items()} | dict(inputs)
        for buffer in graph.buffers:
            if buffer.name in texts:
                self._values[buffer] = self._new_plain(buffer.width, texts[buffer.name]).expression()
            elif buffer.name == "ids":  # as a number, in the history of n-grams
                self._values[buffer] = Expression(torch.Size((buffer.width,)), "(float)id")

    def write_results(self, results: dict[str, tuple[Value, str]], effects: list[Value], before_states: str) -> None:
        """Collect the statements.

        Args:
            results: name → value and C text of its elements, with {} for the offset.
            effects: values of nodes that run for their side effects.
            before_states: C text that runs when all results but new states are written: those begin with "state".
        """
        slices = {name: self.graph.vector(value) for name, (value, _) in results.items()}
        memories = {name: self._new_plain(value.shape.numel(), access) for name, (value, access) in results.items()}
        nodes = self._live_nodes([buffer for buffer, _ in slices.values()] + [value.buffer for value in effects])
        for name, (buffer, offset) in slices.items():
            if name.startswith("gradient") and not offset and buffer.width == memories[name].size:
                self._place(buffer, memories[name])
        self._print(nodes)
        values = {name: self._read(slices[name], memories[name].size) for name in results}
        states = {name: self._store(value) for name, value in values.items() if name.startswith("state")}
        for name, value in values.items():
            is_placed = self._targets.get(slices[name][0]) is memories[name]
            if name not in states and not is_placed:
                self._assign(memories[name], value)
        if before_states:
            self._state(
                before_states, next(iter(memories.values())), {m.leaves[0][0].item() >> 40 for m in states.values()}
            )
        for name, value in states.items():
            self._assign(memories[name], value)

    def _place(self, buffer: Buffer, memory: Memory) -> None:
        """Let the node of a gradient, and a product that only it adds to, write where the gradient lies."""
        node = buffer.node
        if node is None or self._uses[buffer] > 1 or buffer in self._targets:
            return
        if node.kind in ("matmul", "lookup_backward", "sensitivities"):
            self._targets[buffer] = memory
        if node.kind == "sensitivities" and node.operands[5] is not None:
            self._place_whole(node.operands[5], memory)
        if node.kind == "map" and node.fields["function"] == "add":
            products = {operand[0].node.kind if operand[0].node else "": operand for operand in node.operands}
            if products.keys() == {"matmul", "lookup_backward"}:
                rows = products["lookup_backward"][0]
                if self._uses[rows] == 1 and self._place_whole(products["matmul"], memory):
                    self._targets[buffer] = self._targets[rows] = memory
                    self._added_rows.add(rows)

    def _place_whole(self, operand: Slice, memory: Memory) -> bool:
        buffer, offset = operand
        if offset or buffer.width != memory.size or buffer.node is None or buffer.node.kind != "matmul":
            return False
        if self._uses[buffer] == 1:
            self._targets[buffer] = memory
        return buffer in self._targets

    # ---- Memory

    def _new_plain(self, size: int, access: str) -> Memory:
        memory = self._new_memory(size, access.format)
        self._plain.add(memory.number)
        return memory

    def _result(self, node: Node) -> Memory:
        """Memory for what a node computes."""
        return self._targets.get(node.output) or self._new_scratch(node.output.width)

    def _is_plain(self, number: int | None) -> bool:
        return number in self._plain or super()._is_plain(number)

    def _value(self, buffer: Buffer) -> Expression:
        if buffer.constant is None:
            return super()._value(buffer)
        place = self._place_of(buffer.constant)
        return super()._value(buffer) if place is None else place.expression()

    def _place_of(self, values: Tensor) -> Memory | None:
        """The memory of a weight."""
        if values.data_ptr() not in self._parameters:
            return None
        weight, offset = self._parameters[values.data_ptr()]
        if weight.numel() != values.numel():
            raise UnsupportedOp("a part of a weight")
        if offset not in self._weights:
            place = offset - self._num_fixed
            if place < 0:
                text = f"NAME_of_fixed(learner->saved.fixed[{offset} + {{}}])"
                self._weights[offset] = self._new_memory(weight.numel(), text.format)
            else:
                self._weights[offset] = self._new_plain(weight.numel(), f"learner->saved.weights[{place} + {{}}]")
        return self._weights[offset]

    def _matrix(self, operand: Slice, size: int) -> tuple[str, int, str]:
        """C text of a matrix, the number of its memory, and the end of names of functions that read its type."""
        buffer, start = operand
        constant = None if buffer.constant is None else self._parameters.get(buffer.constant.data_ptr())
        if constant is not None and constant[1] < self._num_fixed:
            return f"&learner->saved.fixed[{constant[1] + start}]", self._place_of(buffer.constant).number, "_fixed"
        return *self._contiguous(self._read(operand, size)), ""

    def _vector(self, operand: Slice | None) -> str:
        place = None if operand is None or operand[0].constant is None else self._place_of(operand[0].constant)
        return super()._vector(operand) if place is None else f"&{place.access(str(operand[1]))}"

    def _constant_matrix(self, values: Tensor) -> Expression:
        return leaf(self._constant(values, "float"))

    # ---- Nodes

    def _print_linear(self, node: Node) -> Expression:
        raise UnsupportedOp("a linear map with constant weights")

    _print_embedding = _print_linear

    def _print_ngrams(self, node: Node) -> Expression:
        rows, width = node.fields["rows"], node.fields["width"]
        factors, orders = (torch.tensor(node.fields[name]) for name in ("factors", "orders"))
        if node.fields["steps"] != 1:
            raise UnsupportedOp("n-grams of several bytes")
        windows, of_windows = self._array(node.operands[0], len(factors))
        table, of_table = self._array(node.operands[1], len(orders) * rows * width)
        memory = self._new_scratch(node.output.width)
        tables = f"{self._table('uint32_t', factors)}, {self._table('uint16_t', orders)}"
        find = f"NAME_ngram_rows({tables}, {windows}, learner->rows, {len(orders)}, {rows}, {len(factors)});"
        read = f"NAME_read_rows({table}, learner->rows, {memory.pointer}, {len(orders)}, {width});"
        self._state(f"{find}\n{read}", memory, {of_windows, of_table})
        return memory.expression()

    def _print_map(self, node: Node) -> Expression:
        if node.output in self._targets:  # a product and the rows that were added to it
            return self._targets[node.output].expression()
        return super()._print_map(node)

    def _print_broadcast(self, node: Node) -> Expression:
        outer, count, inner = (node.fields[name] for name in ("outer", "count", "inner"))
        value = self._computed(self._read(node.operands[0], outer * inner))
        return value.move(lambda a: a.view(outer, 1, inner).expand(outer, count, inner).reshape(-1))

    def _print_matmul(self, node: Node) -> Expression:
        f = node.fields
        rows, depth, width = f["rows"], f["depth"], f["width"]
        is_outer = depth == 1
        is_map, is_back = rows == 1 and f["b_depth"] == 1, rows == 1 and f["b_width"] == 1
        # The matrix of a product with a vector may be in fixed point.
        matrix = None if is_outer else 1 if is_map or is_back else 0
        operands = zip(node.operands[:2], (rows * depth, depth * width), strict=True)
        (a, of_a, a_type), (b, of_b, b_type) = (
            self._matrix(one, size) if k == matrix else (*self._contiguous(self._read(one, size)), "")
            for k, (one, size) in enumerate(operands)
        )
        memory = self._result(node)
        if is_outer:
            call = "outer", a, b, rows, width
        elif is_map:
            call = f"map{b_type}", b, a, width, depth
        elif is_back:
            call = f"map_back{b_type}", a, b, depth, width
        elif width == 1 and f["a_depth"] == 1:
            call = f"map{a_type}", a, b, rows, depth
        else:
            raise UnsupportedOp("a product of two matrices")
        function, first, second, *sizes = call
        return self._call(function, 1, memory, {of_a, of_b}, first, second, memory.pointer, *sizes)

    def _print_norm_backward(self, node: Node) -> Expression:
        width, count = node.fields["width"], node.fields["count"]
        (x, of_x), (grad, of_grad) = (self._array(one, width * count) for one in node.operands)
        eps, memory = literal(node.fields["eps"]), self._new_scratch(node.output.width)
        arrays = (x, width), (grad, width), (memory.pointer, width)
        return self._call("norm_backward", count, memory, {of_x, of_grad}, eps, *arrays, width)

    def _print_nll_loss(self, node: Node) -> Expression:
        self._check_byte(node, "labels")
        x, number = self._array(node.operands[0], node.fields["width"])
        memory = self._new_scratch(1)
        self._state(f"{memory.access('0')} = -({x})[label];", memory, {number})
        return memory.expression()

    def _print_nll_loss_backward(self, node: Node) -> Expression:
        self._check_byte(node, "labels")
        grad, number = self._array(node.operands[0], 1)
        memory = self._new_scratch(node.output.width)
        clear = f"for (int i = 0; i < {memory.size}; i++) {memory.access('i')} = 0.0f;"
        self._state(f"{clear}\n({memory.pointer})[label] = -*({grad});", memory, {number})
        return memory.expression()

    def _print_lookup(self, node: Node) -> Expression:
        self._check_byte(node, "ids")
        height, width = node.fields["height"], node.fields["width"]
        table, number, kind = self._matrix(node.operands[0], height * width)
        memory, element = self._new_scratch(width), f"({table})[(long)id * {width} + i]"
        element = f"NAME_of_fixed({element})" if kind else element
        text = f"for (int i = 0; i < {width}; i++) {memory.access('i')} = {element};"
        self._state(text, memory, {number})
        return memory.expression()

    def _print_lookup_backward(self, node: Node) -> Expression:
        self._check_byte(node, "ids")
        width, memory = node.fields["width"], self._result(node)
        x, number = self._array(node.operands[0], width)
        clear = f"for (int i = 0; i < {memory.size}; i++) {memory.access('i')} = 0.0f;\n"
        add = f"for (int i = 0; i < {width}; i++) ({memory.pointer})[(long)id * {width} + i] += ({x})[i];"
        self._state(add if node.output in self._added_rows else clear + add, memory, {number})
        return memory.expression()

    def _check_byte(self, node: Node, name: str) -> None:
        if node.fields["steps"] != 1 or node.operands[1][0].name != name:
            raise UnsupportedOp(f"{node.kind} of something else than one byte")

    def _print_finite(self, node: Node) -> Expression:
        value = self._computed(self._read(node.operands[0], 1))
        x, number = self._contiguous(value)
        text = f"if (!(fabsf(*({x})) < INFINITY)) return NAME_DIVERGED;"
        self._state(text, self.memory[number], {number})
        return value

    def _print_sensitivities(self, node: Node) -> Expression:
        channels, rows, groups, columns = (node.fields[name] for name in ("channels", "rows", "groups", "columns"))
        if node.fields["steps"] != 1 or channels > MOST_CHANNELS:
            raise UnsupportedOp("sensitivities of several bytes or of large groups")
        sizes = (rows * channels * groups * columns, channels * channels * groups, channels * rows * groups, columns)
        read, numbers = [], set()
        for operand, size in zip(node.operands[:5], (*sizes, channels * groups), strict=True):
            text, number = ("0", None) if operand is None else self._contiguous(self._read(operand, size))
            read.append(text)
            numbers |= set() if number is None else {number}
        if node.operands[5] is None:
            memory, gradient = self._new_scratch(1), "0"
        else:
            memory = self._result(node)
            gradient = memory.pointer
            value = self._read(node.operands[5], memory.size)
            if value.text != "{0}" or not torch.equal(value.leaves[0], memory.addresses()):
                self._assign(memory, value)
        arguments = ", ".join([*read, gradient, *map(str, (channels, rows, groups, columns))])
        self._state(f"NAME_sensitivities({arguments});", memory, numbers)
        return memory.expression()
