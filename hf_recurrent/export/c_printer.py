"""The graph of one step as statements of C99.

Every buffer of the graph is an expression over elements in memory: maps become text, moves become addresses, and both
cost nothing until a value is read several times or a function needs its elements next to one another.
"""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_recurrent.export.c_footprint import graph_operations
from hf_recurrent.export.c_loops import ZERO, Expression, Loop, bare, combine, find_loops, leaf, loop_text, offset_text
from hf_recurrent.export.c_tables import Table, literal
from hf_recurrent.kernels.functions import FUNCTIONS
from hf_recurrent.kernels.step_graph import ADDRESS_BITS, OFFSET_MASK, Buffer, Node, Slice, StepGraph, UnsupportedOp
from hf_recurrent.kernels.weight_rows import largest_code, quantize_rows

_MOST_LINES = 400  # of one statement


class Memory:
    """An array in C: `access` gives the text of the element at an offset."""

    def __init__(self, number: int, size: int, access: Callable[[str], str], values: Tensor | None = None):
        self.number, self.base = number, number << ADDRESS_BITS
        self.size, self.access, self.values = size, access, values
        self.pointer = f"&{access('0')}"

    def addresses(self) -> Tensor:
        return self.base + torch.arange(self.size)

    def expression(self) -> Expression:
        return leaf(self.addresses())


class Statement(NamedTuple):
    """C text, and the numbers of the scratch memory that it writes and reads."""

    text: str
    writes: set[int]
    reads: set[int]


class CPrinter:
    """Prints a graph.

    Args:
        graph: of one step, with an input "ids" or "values".
        fields: names of the parts of the state, which are inputs of the graph → their names in the struct.
        first_table: number of the first constant array, so that two graphs have arrays of different names.
    """

    def __init__(self, graph: StepGraph, fields: dict[str, str], first_table: int = 0):
        self.graph, self.fields = graph, list(fields.values())
        self.tables: dict[str, Table] = {}
        self.first_table = first_table
        self.vocab_size: int | None = None  # rows of the embedding
        self.statements: list[Statement] = []
        self.operations = 0  # of one step
        self.memory: list[Memory] = []
        # Memory for the time of a step: of floats, and of activations as 16-bit integers.
        self.scratch: dict[int, Memory] = {}
        self.codes: dict[int, Memory] = {}
        self._tables: dict[Any, Any] = {}
        self._quantized: dict[tuple[str, int, int], tuple[Memory, Memory]] = {}
        self._values: dict[Buffer, Expression] = {}
        by_name = {buffer.name: buffer for buffer in graph.buffers if buffer.name is not None}
        self.values = None  # the memory of real-valued inputs
        if "values" in by_name:
            self.values = self._new_memory(by_name["values"].width, "values[{}]".format)
            self._values[by_name["values"]] = self.values.expression()
        # Their type is known at the end: \x01 number \x02 offset \x03 marks a read.
        self.states = []
        for k, name in enumerate(fields):
            state = self._new_memory(by_name[name].width, lambda offset, k=k: f"\x01{k}\x02{offset}\x03")
            self.states.append(state)
            self._values[by_name[name]] = state.expression()

    def write(self, outputs: Tensor, parts: list[Tensor]) -> None:
        """Collect the statements that compute the outputs and the new state, given their addresses in the graph."""
        self._print(self._live_nodes([buffer for index in (outputs, *parts) for buffer in self._buffers(index)]))
        self.num_outputs = outputs.numel()
        self._assign(self._new_memory(self.num_outputs, "outputs[{}]".format), self._gather(outputs))
        values = [self._gather(index) for index in parts]
        self.halves = [
            name != "ngrams" and self._only_keeps(state, part)  # ids of large vocabularies are exact in float only
            for name, state, part in zip(self.fields, self.states, values, strict=True)
        ]
        # No part may be overwritten before all are read.
        values = [
            part if self._is_shift(state, part) else self._store(part)
            for state, part in zip(self.states, values, strict=True)
        ]
        for state, field, half, part in zip(self.states, self.fields, self.halves, values, strict=True):
            target = Memory(state.number, state.size, f"state->{field}[{{}}]".format)
            self._assign(target, combine("NAME_narrow({0})", [part]) if half else part)

    def body(self, offsets: dict[int, int]) -> str:
        """The statements, with scratch memory at these offsets."""
        text = "\n".join(statement.text for statement in self.statements if statement.text)
        text = re.sub(r"@(\d+)@ \+ ", lambda match: f"{offsets[int(match[1])]} + ", text)
        text = re.sub(r"\[(\d+) \+ (\d+)\b(?! \*)", lambda match: f"[{int(match[1]) + int(match[2])}", text)
        text = re.sub(r"\[0 \+ ", "[", text)

        def read(match: re.Match) -> str:
            k = int(match[1])
            element = f"state->{self.fields[k]}[{match[2]}]"
            return f"NAME_wide({element})" if self.halves[k] else element

        text = re.sub(r"\x01(\d+)\x02(.*?)\x03", read, text)
        return re.sub(r"NAME_narrow\(NAME_wide\((state->\w+\[[^\]]*\])\)\)", r"\1", text)  # moved as it is

    # ---- Memory

    def _new_memory(self, size: int, access: Callable[[str], str], values: Tensor | None = None) -> Memory:
        self.memory.append(Memory(len(self.memory), size, access, values))
        return self.memory[-1]

    def _new_scratch(self, size: int) -> Memory:
        memory = self._new_memory(size, f"work[@{len(self.memory)}@ + {{}}]".format)
        self.scratch[memory.number] = memory
        return memory

    def _new_codes(self, size: int) -> Memory:
        memory = self._new_memory(size, f"codes[@{len(self.memory)}@ + {{}}]".format)
        self.codes[memory.number] = memory
        return memory

    def _table(self, kind: str, values: Tensor) -> str:
        """The name of a new constant array."""
        prefix = {"int8_t": "table", "float": "vector"}.get(kind, "offsets")
        name = f"NAME_{prefix}_{self.first_table + len(self.tables)}"
        self.tables[name] = Table(kind, name, values)
        return name

    def _once(self, kind: str, values: Tensor, make: Callable[[], Any]) -> Any:
        key = (kind, values.data_ptr(), tuple(values.shape), values.stride())
        if key not in self._tables:
            self._tables[key] = values, make()  # kept, so that its address is not used again
        return self._tables[key][1]

    def _vector(self, operand: Slice | None) -> str:
        """The name of a float array of a constant, or a null pointer."""
        if operand is None:
            return "0"
        values = operand[0].constant
        if values is None:
            raise UnsupportedOp("a norm or mask that depends on the inputs")
        return self._once("vector", values, lambda: self._table("float", values))

    def _rows(self, weight: Tensor) -> tuple[str, str]:
        """Names of the int8 table and of the scales of a weight (outputs, inputs)."""

        def write():
            table, scale = quantize_rows(weight)
            return self._table("int8_t", table), self._table("float", scale)

        return self._once("rows", weight, write)

    def _constant(self, values: Tensor, kind: str) -> Tensor:
        """Addresses of the elements of a new table."""
        access = ("{}[{{}}]" if kind == "float" else "(float){}[{{}}]").format(self._table(kind, values)).format
        return self._new_memory(values.numel(), access, values.flatten()).addresses().view(values.shape)

    def _constant_value(self, values: Tensor) -> Expression:
        """A literal, a vector, or an int8 table whose last dimension is the channels."""
        shape = values.shape
        for dim in range(values.dim()):  # a constant that was broadcast
            if bool((values == values.narrow(dim, 0, 1)).all()):
                values = values.narrow(dim, 0, 1)
        if values.numel() == 1:
            return Expression(torch.Size((shape.numel(),)), literal(float(values)))
        if sum(size > 1 for size in values.shape) == 1:
            value = leaf(self._constant(values, "float"))
        else:
            value = self._constant_matrix(values)
        return value.move(lambda addresses: addresses.expand(shape).reshape(-1))

    def _constant_matrix(self, values: Tensor) -> Expression:
        table, scale = quantize_rows(values.reshape(-1, values.shape[-1]).t())
        elements = leaf(self._constant(table.t().reshape(values.shape), "int8_t"))
        return combine("({0} * {1})", [elements, leaf(self._constant(scale.flatten(), "float"))])

    # ---- Values

    def _value(self, buffer: Buffer) -> Expression:
        if buffer.constant is not None:
            values = buffer.constant
            return self._once("value", values, lambda: self._constant_value(values))
        if buffer not in self._values:
            raise UnsupportedOp("an operator on token ids other than aten.embedding")
        return self._values[buffer]

    def _read(self, operand: Slice, width: int) -> Expression:
        buffer, offset = operand
        value = self._value(buffer)
        return value if buffer.width == width else value.move(lambda a: a[offset : offset + width])

    def _buffers(self, index: Tensor) -> list[Buffer]:
        return [self.graph.buffers[number] for number in (index >> ADDRESS_BITS).unique().tolist()]

    def _gather(self, index: Tensor) -> Expression:
        """The elements at addresses of the graph."""
        index = index.reshape(-1)
        buffers = self._buffers(index)
        offsets = index & OFFSET_MASK
        if len(buffers) == 1:
            return self._value(buffers[0]).move(lambda addresses: addresses[offsets])
        addresses = torch.full(index.shape, ZERO)
        for number in (index >> ADDRESS_BITS).unique().tolist():
            inside = (index >> ADDRESS_BITS) == number
            addresses[inside] = self._addresses(self._value(self.graph.buffers[number]))[offsets[inside]]
        return leaf(addresses)

    def _addresses(self, value: Expression) -> Tensor:
        """Addresses of the elements of a value, which is stored if it is computed."""
        if value.text == "0.0f":
            return torch.full(value.shape, ZERO)
        return value.leaves[0] if value.text == "{0}" else self._store(value).leaves[0]

    def _computed(self, value: Expression) -> Expression:
        """The value, stored if several reads would compute it again."""
        return self._store(value) if value.leaves and value.text != "{0}" else value

    def _store(self, value: Expression) -> Expression:
        """The value in scratch memory."""
        memory = self._new_scratch(value.shape.numel())
        self._assign(memory, value)
        return memory.expression()

    def _contiguous(self, value: Expression) -> tuple[str, int]:
        """C text of an array that holds the value, without the pointer's offset, and the number of its memory."""
        addresses = value.leaves[0].reshape(-1) if value.text == "{0}" else None
        number = None if addresses is None else int(addresses[0]) >> ADDRESS_BITS
        if not self._is_plain(number) or not bool((addresses.diff() == 1).all()):
            return self._contiguous(self._store(value))
        return f"&{self.memory[number].access(str(int(addresses[0]) & OFFSET_MASK))}", number

    def _array(self, operand: Slice, width: int) -> tuple[str, int]:
        """[`_contiguous`] of an operand with that many elements."""
        return self._contiguous(self._read(operand, width))

    def _is_plain(self, number: int | None) -> bool:
        """True for the number of memory that is a float array as it is."""
        return number in self.scratch or (self.values is not None and number == self.values.number)

    # ---- Statements

    def _assign(self, target: Memory, value: Expression, offsets: Tensor | None = None, update: str = "{0}") -> None:
        """target[offsets] = value, by default at all offsets in order; `update` may combine it with the old element,
        {1}."""
        addresses = target.addresses() if offsets is None else target.base + offsets
        leaves = [addresses, *(part.reshape(-1) for part in value.leaves)]
        loops = find_loops(leaves)
        if loops is None and (update != "{0}" or target.number in {state.number for state in self.states}):
            self._assign(target, self._store(value), offsets, update)
            return
        memories, group_of = torch.stack(leaves).bitwise_right_shift(ADDRESS_BITS).unique(dim=1, return_inverse=True)
        if loops is None and memories.shape[1] > 1:  # such as two parts whose elements alternate
            for group in range(memories.shape[1]):
                inside = group_of == group
                part = value.move(lambda a, inside=inside: a.reshape(-1)[inside])
                self._assign(target, part, leaves[0][inside] - target.base)
            return
        texts = self._table_loop(leaves, value) if loops is None else []
        for loop in loops or []:
            if "".join(texts).count("\n") > _MOST_LINES:
                raise UnsupportedOp("an irregular order of elements")
            operands = [self._access(loop, k) for k in range(1, len(leaves))]
            if update == "({1} + {0})" and "0.0f" in operands and re.fullmatch(r"[\s()*{}\d]*", value.text):
                continue  # a product with 0
            text = re.sub(r"\{(\d+)\}", lambda match, o=operands: o[int(match[1])], value.text)
            element = target.access(offset_text(loop.first[0] - target.base, loop.row_step[0], loop.step[0]))
            texts.append(loop_text(loop, f"{element} = {bare(update.format(text, element))};"))
        reads = {int(x) for part in value.leaves for x in torch.unique(part >> ADDRESS_BITS)}
        reads |= {target.number} if update != "{0}" else set()
        self._state("\n".join(texts), target, reads)

    def _state(self, text: str, target: Memory, reads: set[int]) -> None:
        temporary = self.scratch.keys() | self.codes.keys()
        self.statements.append(Statement(text, {target.number} & temporary, reads & temporary))

    def _access(self, loop: Loop, k: int) -> str:
        first = loop.first[k]
        if first == ZERO:
            return "0.0f"
        memory = self.memory[first >> ADDRESS_BITS]
        offset = first - memory.base
        row_step, step = loop.row_step[k] if loop.rows > 1 else 0, loop.step[k] if loop.columns > 1 else 0
        if memory.values is not None and not row_step and not step and memory.values.dtype != torch.int8:
            return literal(float(memory.values[offset]))
        return memory.access(offset_text(offset, row_step, step))

    def _table_loop(self, leaves: list[Tensor], value: Expression) -> list[str]:
        """One loop that reads irregular offsets from tables."""
        operands = []
        for addresses in leaves:
            numbers = torch.unique(addresses >> ADDRESS_BITS)
            if len(numbers) != 1 or int(numbers[0]) < 0:
                raise UnsupportedOp("an irregular order of elements")
            memory = self.memory[int(numbers[0])]
            offsets, size = addresses - memory.base, len(addresses)
            step = int(offsets[1] - offsets[0]) if size > 1 else 0
            if bool((offsets.diff() == step).all()):
                operands.append(memory.access(offset_text(int(offsets[0]), 0, step)))
            else:
                kind = "uint16_t" if int(offsets.max()) < 1 << 16 else "uint32_t"
                operands.append(memory.access(f"{self._table(kind, offsets)}[i]"))
        text = re.sub(r"\{(\d+)\}", lambda match: operands[1 + int(match[1])], value.text)
        return [f"for (int i = 0; i < {len(leaves[0])}; i++) {operands[0]} = {bare(text)};"]

    def _call(
        self, function: str, rows: int, target: Memory, reads: set[int], *arguments: str | int | tuple[str, int]
    ) -> Expression:
        """A call for each of `rows` rows; a pair is an array and the distance of its rows."""

        def text(argument: str | int | tuple[str, int]) -> str:
            if not isinstance(argument, tuple):
                return str(argument)
            array, step = argument
            return array if rows == 1 else f"{array} + {offset_text(0, step, 0)}"

        loop = f"for (int row = 0; row < {rows}; row++) " if rows > 1 else ""
        self._state(f"{loop}NAME_{function}({', '.join(map(text, arguments))});", target, reads)
        return target.expression()

    # ---- Nodes

    def _live_nodes(self, read: list[Buffer]) -> list[Node]:
        """The nodes that compute buffers, whose uses are counted."""
        nodes = self.graph.live_nodes(read)
        self.operations = graph_operations(nodes)
        self._uses = Counter([*read, *(operand[0] for node in nodes for operand in filter(None, node.operands))])
        return nodes

    def _print(self, nodes: list[Node]) -> None:
        for node in nodes:
            value = getattr(self, f"_print_{node.kind}", self._unsupported)(node)
            self._values[node.output] = self._computed(value) if self._uses[node.output] > 1 else value

    def _unsupported(self, node: Node) -> Expression:
        raise UnsupportedOp(node.kind)

    def _print_map(self, node: Node) -> Expression:
        width, function = node.output.width, FUNCTIONS[node.fields["function"]]
        if function.name == "splat":
            return self._computed(self._read(node.operands[0], 1)).move(lambda addresses: addresses.expand(width))
        operands = [self._read(operand, width) for operand in node.operands]
        if function.name == "where" and (condition := node.operands[0][0].constant) is not None:
            first = node.operands[0][1]
            chosen = condition.reshape(-1)[first : first + width] != 0
            return leaf(torch.where(chosen, *map(self._addresses, operands[1:])))
        text = function.c.replace("{s}", literal(node.fields["scalar"]))
        return combine(text, operands) if operands else Expression(torch.Size((width,)), text)

    def _print_move(self, node: Node) -> Expression:
        pieces = node.fields["pieces"]
        addresses = torch.full((node.output.width,), ZERO)
        for source, tables, start, width in pieces:
            index, to_index = (None, slice(start, start + width)) if tables is None else tables
            if index is not None:
                width, to_index = source[0].width, slice(None) if to_index is None else to_index.long()
            value = self._read(source, width)
            if index is not None:
                value = self._computed(value) if len(index) > width else value
                value = value.move(lambda a, index=index: a[index.long()])
            if len(pieces) == 1:
                return value
            addresses[to_index] = self._addresses(value)
        return leaf(addresses)

    def _print_embedding(self, node: Node) -> Expression:
        if node.operands[0][0].name != "ids" or self.values is not None:
            raise UnsupportedOp("aten.embedding of something else than the token")
        weight, width = node.fields["weight"], node.fields["width"]
        table, scale = self._rows(weight)
        self.vocab_size = min(len(weight), self.vocab_size or len(weight))
        memory = self._new_scratch(width)
        text = f"{memory.access('i')} = {scale}[id] * (float){table}[(long)id * {width} + i];"
        self._state(f"for (int i = 0; i < {width}; i++) {text}", memory, set())
        return memory.expression()

    def _print_token(self, node: Node) -> Expression:
        if node.operands[0][0].name != "ids" or self.values is not None:
            raise UnsupportedOp("a conversion of something else than the token")
        return Expression(torch.Size((1,)), "(float)id")

    def _print_ngrams(self, node: Node) -> Expression:
        steps, rows, width = (node.fields[name] for name in ("steps", "rows", "width"))
        factors, orders = (torch.tensor(node.fields[name]) for name in ("factors", "orders"))
        windows, number = self._array(node.operands[0], steps * len(factors))
        table = *self._rows(node.fields["weight"]), self._table("uint32_t", factors), self._table("uint16_t", orders)
        memory, sizes = self._new_scratch(node.output.width), (len(orders), rows, len(factors), width)
        arrays = (windows, len(factors)), (memory.pointer, len(orders) * width)
        return self._call("ngrams", steps, memory, {number}, *table, *arrays, *sizes)

    def _print_linear(self, node: Node) -> Expression:
        count, width, depth = (node.fields[name] for name in ("count", "width", "depth"))
        codes, x_scale = self._quantize(self._read(node.operands[0], count * depth), count, depth)
        weight = *self._rows(node.fields["weight"]), self._vector(node.operands[1])
        memory, reads = self._new_scratch(node.output.width), {codes.number, x_scale.number}
        arrays = (codes.pointer, depth), (x_scale.pointer, 1), (memory.pointer, width)
        return self._call("linear", count, memory, reads, *weight, *arrays, width, depth)

    def _quantize(self, value: Expression, count: int, depth: int) -> tuple[Memory, Memory]:
        """16-bit integers of `count` rows and their scales, computed once for all maps of the same rows."""
        x, number = self._contiguous(value)
        key = x, count, depth
        if key not in self._quantized:
            codes, scale = self._quantized[key] = self._new_codes(count * depth), self._new_scratch(count)
            results, most = ((codes.pointer, depth), (scale.pointer, 1)), literal(largest_code(depth))
            self._call("quantize", count, codes, {number}, (x, depth), most, *results, depth)
            self.statements[-1].writes.add(scale.number)
        return self._quantized[key]

    def _print_norm(self, node: Node) -> Expression:
        x, number = self._array(node.operands[0], node.output.width)
        width, memory = node.fields["width"], self._new_scratch(node.output.width)
        function = "layer_norm" if node.fields["center"] else "rms_norm"
        constants = *map(self._vector, node.operands[1:]), literal(node.fields["eps"])
        arrays, rows = ((x, width), (memory.pointer, width)), node.output.width // width
        return self._call(function, rows, memory, {number}, *constants, *arrays, width)

    def _print_reduce(self, node: Node) -> Expression:
        outer, count, inner = (node.fields[name] for name in ("outer", "count", "inner"))
        width, reduction = outer * inner, node.fields["reduction"]
        terms = self._read(node.operands[0], count * width)
        terms = terms.move(lambda a: a.view(outer, count, inner).transpose(0, 1).reshape(-1))
        memory = self._new_scratch(width)
        if reduction in ("maximum", "minimum"):
            update = "fmaxf({1}, {0})" if reduction == "maximum" else "fminf({1}, {0})"
            self._assign(memory, terms.move(lambda a: a[:width]))
            terms, count = terms.move(lambda a: a[width:]), count - 1
        else:
            update = "({1} + {0})"
            self._assign(memory, Expression(torch.Size((width,)), "0.0f"))
        if count:
            self._assign(memory, terms, torch.arange(width).repeat(count), update)
        if reduction != "mean":
            return memory.expression()
        return combine(f"({{0}} * {literal(1 / count)})", [memory.expression()])

    def _print_softmax(self, node: Node) -> Expression:
        x, number = self._array(node.operands[0], node.output.width)
        width, memory = node.fields["width"], self._new_scratch(node.output.width)
        return self._call("softmax", node.fields["rows"], memory, {number}, (x, width), (memory.pointer, width), width)

    def _print_product(self, node: Node) -> Expression:
        matrices, rows, depth, width = (node.fields[name] for name in ("matrices", "rows", "depth", "width"))
        a, of_a = self._array(node.operands[0], matrices * rows * depth)
        b, of_b = self._array(node.operands[1], matrices * depth * width)
        memory = self._new_scratch(node.output.width)
        arrays = (a, rows * depth), (b, depth * width), (memory.pointer, rows * width)
        return self._call("product", matrices, memory, {of_a, of_b}, *arrays, rows, depth, width)

    def _print_attention(self, node: Node) -> Expression:
        heads, queries, keys, width = (node.fields[name] for name in ("heads", "queries", "keys", "width"))
        sizes = zip(node.operands[:3], (queries, keys, keys), strict=True)
        (q, of_q), (k, of_k), (v, of_v) = (self._array(x, heads * n * width) for x, n in sizes)
        mask = node.operands[3]
        if node.fields["causal"]:
            above = torch.full((queries, keys), -torch.inf).triu(1).expand(heads, queries, keys).contiguous()
            mask = self.graph.constant(above), 0
        mask, scale = self._vector(mask), literal(node.fields["scale"])
        memory, scores = self._new_scratch(node.output.width), self._new_scratch(keys)
        for head in range(heads):
            first, at = head * queries * width, head * keys * width
            arrays = (f"{q} + {first}", width), f"{k} + {at}", f"{v} + {at}"
            of_head = mask if mask == "0" else (f"{mask} + {head * queries * keys}", keys)
            y, reads = (f"{memory.pointer} + {first}", width), {of_q, of_k, of_v}
            self._call("attend", queries, memory, reads, *arrays, of_head, scale, scores.pointer, y, keys, width)
            self.statements[-1].writes.add(scores.number)
        return memory.expression()

    # ---- State

    def _is_shift(self, state: Memory, part: Expression) -> bool:
        """True where the new state can be written in place: it reads itself at or after each offset, and no other."""
        for addresses in part.leaves:
            of_states = torch.zeros_like(addresses, dtype=torch.bool)
            for other in self.states:
                inside = (addresses >> ADDRESS_BITS) == other.number
                if other is not state and bool(inside.any()):
                    return False
                of_states |= inside
            if bool((of_states & (addresses < state.base + torch.arange(len(addresses)))).any()):
                return False
        return True

    def _only_keeps(self, state: Memory, part: Expression) -> bool:
        """True for a buffer: a part of the old state moved on, and new elements."""
        return part.text == "{0}" and bool(((part.leaves[0] >> ADDRESS_BITS) == state.number).any())
