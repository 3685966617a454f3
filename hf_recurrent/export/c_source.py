"""One step of a model as a C99 file: int8 tables for weights, the state in a struct, nothing allocated.

The exported graph is run once with addresses in the place of numbers (`c_loops.py`). What depends on weights only is
computed here. Weights of linear maps, embeddings and taps become int8, symmetric, with a scale for each output
channel; vectors stay float. A part of the state that only keeps numbers for later steps, such as the buffer of a
convolution, is stored in half precision; parts that are computed anew in every step stay float.
"""

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from hf_recurrent.export.c_loops import (
    BUFFER_BITS,
    ZERO,
    Expression,
    Loop,
    combine,
    find_loops,
    holds,
    leaf,
    place_text,
)
from hf_recurrent.export.c_operations import HELPERS, MOVES, elementwise, literal
from hf_recurrent.export.weight_types import quantize_rows

aten = torch.ops.aten
_COPIES = {aten._to_copy.default, aten.clone.default}
_SUMS = {aten.sum.dim_IntList, aten.mean.dim}
_NORMS = {aten.layer_norm.default: "layer_norm", aten.rms_norm.default: "rms_norm"}


class UnknownOperation(Exception):
    """An operation has no form in C."""


class _Buffer:
    """Memory of the step: `access` gives the C text of the number at a place."""

    def __init__(self, number: int, size: int, access: Callable[[str], str], values: Tensor | None = None):
        self.base, self.size, self.access, self.values = number << BUFFER_BITS, size, access, values

    def addresses(self, shape) -> Tensor:
        return self.base + torch.arange(self.size).view(shape)


class CWriter(fx.Interpreter):
    """Runs a graph with one stream and collects its statements.

    Args:
        program: one step, float32.
        state_names: of the parts of the state.
    """

    def __init__(self, program: ExportedProgram, state_names: list[str]):
        super().__init__(program.module(check_guards=False))
        self.tables: list[str] = []
        self.statements: list[tuple[str, set[int], set[int]]] = []  # text, scratch buffers written, read
        self.scratch: dict[int, _Buffer] = {}
        self.buffers: dict[int, _Buffer] = {}
        self._known: dict[Any, tuple] = {}
        self._kept: list[Tensor] = []  # so that memory of constants is not used again
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        values = [node.meta["val"] for node in inputs]
        self.reads_values = values[0].is_floating_point()
        if any(value.is_floating_point() and value.dtype != torch.float32 for value in values):
            raise ValueError("`model` must have float32 weights for C; call `model.float()` first.")
        shapes = [(1, *value.shape[1:]) for value in values]
        self.inputs = self._buffer(shapes[0], (lambda place: f"values[{place}]") if self.reads_values else str)
        # Their type is known at the end: \x01 number \x02 place \x03 stands for a read.
        self.states = [
            self._buffer(shape, lambda place, k=k: f"\x01{k}\x02{place}\x03") for k, shape in enumerate(shapes[1:])
        ]
        self.fields = [re.sub(r"\W", "_", name) for name in state_names]
        self.token = self.inputs.base
        self.num_inputs = self.inputs.size

    def write(self) -> None:
        """Run the graph and collect the statements of one step."""
        outputs, *parts = self.run(
            leaf(self.inputs.addresses((1, self.num_inputs) if self.reads_values else (1,))),
            *(leaf(state.addresses(shape)) for state, shape in zip(self.states, self._state_shapes(), strict=True)),
        )
        self.num_outputs = outputs.shape.numel()
        self._assign(self._buffer((self.num_outputs,), lambda place: f"outputs[{place}]"), outputs)
        self.halves = [self._only_keeps(state, part) for state, part in zip(self.states, parts, strict=True)]
        # No part may be overwritten before all are read.
        parts = [
            part if self._is_shift(state, part) else self._store(part)
            for state, part in zip(self.states, parts, strict=True)
        ]
        for state, field, half, part in zip(self.states, self.fields, self.halves, parts, strict=True):
            target = _Buffer(state.base >> BUFFER_BITS, state.size, lambda place, f=field: f"state->{f}[{place}]")
            self._assign(target, combine("NAME_narrow({0})", [part]) if half else part)

    def body(self, places: dict[int, int]) -> str:
        """The statements, with scratch buffers at these places."""
        text = "\n".join(text for text, _, _ in self.statements if text)
        text = re.sub(r"@(\d+)@ \+ ", lambda match: f"{places[int(match[1])]} + ", text)
        text = re.sub(r"\[(\d+) \+ (\d+)\b(?! \*)", lambda match: f"[{int(match[1]) + int(match[2])}", text)
        text = re.sub(r"\[0 \+ ", "[", text)

        def read(match: re.Match) -> str:
            k = int(match[1])
            number = f"state->{self.fields[k]}[{match[2]}]"
            return f"NAME_wide({number})" if self.halves[k] else number

        text = re.sub(r"\x01(\d+)\x02(.*?)\x03", read, text)
        return re.sub(r"NAME_narrow\(NAME_wide\((state->\w+\[[^\]]*\])\)\)", r"\1", text)  # moved as it is

    def _state_shapes(self):
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"][1:]
        return [(1, *node.meta["val"].shape[1:]) for node in nodes]

    # Buffers

    def _buffer(self, shape, access, values: Tensor | None = None) -> _Buffer:
        size = int(torch.Size(shape).numel())
        number = len(self.buffers)
        self.buffers[number] = _Buffer(number, size, access, values)
        return self.buffers[number]

    def _new_scratch(self, shape) -> _Buffer:
        number = len(self.buffers)
        buffer = self._buffer(shape, lambda place: f"work[@{number}@ + {place}]")
        self.scratch[number] = buffer
        return buffer

    def _table(self, kind: str, values: Tensor) -> str:
        """The name of a new constant array."""
        name = f"NAME_{'table' if kind == 'int8_t' else 'vector' if kind == 'float' else 'places'}_{len(self.tables)}"
        numbers = values.reshape(-1).tolist()
        texts = [literal(value).strip("()") if kind == "float" else str(int(value)) for value in numbers]
        lines, line = [], "   "
        for text in texts:
            if len(line) + len(text) > 116:
                lines.append(line)
                line = "   "
            line += f" {text},"
        body = "\n".join([*lines, line])
        self.tables.append(f"static const {kind} {name}[{len(texts)}] = {{\n{body}\n}};")
        return name

    def _vector(self, values: Tensor | None) -> str:
        """The name of a float array of a constant, or NULL."""
        if values is None:
            return "0"
        return self._once("vector", values, lambda: self._table("float", values))

    def _rows(self, weight: Tensor) -> tuple[str, str]:
        """Names of the int8 table and of the scales of a weight (outputs, I)."""

        def write():
            table, scale = quantize_rows(weight)
            return self._table("int8_t", table), self._table("float", scale)

        return self._once("rows", weight, write)

    def _once(self, kind: str, values: Tensor, make: Callable):
        key = (kind, values.data_ptr(), tuple(values.shape), values.stride())
        if key not in self._known:
            self._kept.append(values)
            self._known[key] = make()
        return self._known[key]

    # Values

    def _operand(self, value: Any) -> Expression:
        """A value, a constant or a number as an expression."""
        if isinstance(value, Expression):
            return value
        if not isinstance(value, Tensor):
            return Expression(torch.Size(), literal(float(value)))
        if value.numel() == 1 or bool((value == value.reshape(-1)[0]).all()):
            return Expression(value.shape, literal(float(value.reshape(-1)[0])))
        if sum(size > 1 for size in value.shape) == 1:
            return leaf(self._once("vector operand", value, lambda: self._constant(value, "float")))
        return self._once("table operand", value, lambda: self._quantized(value))

    def _constant(self, values: Tensor, kind: str) -> Tensor:
        name = self._table(kind, values)
        access = f"{name}[{{}}]" if kind == "float" else f"(float){name}[{{}}]"
        return self._buffer(values.shape, access.format, values.reshape(-1)).addresses(values.shape)

    def _quantized(self, values: Tensor) -> Expression:
        """A table whose last dimension is that of channels."""
        table, scale = quantize_rows(values.reshape(-1, values.shape[-1]).t())
        table = leaf(self._constant(table.t().reshape(values.shape), "int8_t"))
        return combine("({0} * {1})", [table, leaf(self._constant(scale.reshape(-1), "float"))])

    def _store(self, value: Expression) -> Expression:
        """The value in scratch memory."""
        buffer = self._new_scratch(value.shape)
        self._assign(buffer, value)
        return leaf(buffer.addresses(value.shape))

    def _contiguous(self, value: Expression) -> tuple[str, int | None]:
        """C text of the first place of a value that lies in scratch memory or `values`, and its buffer."""
        addresses = value.leaves[0].reshape(-1) if value.text == "{0}" else None
        number = None if addresses is None else int(addresses[0]) >> BUFFER_BITS
        plain = number in self.scratch or (self.reads_values and number == 0)
        if not plain or not bool((addresses.diff() == 1).all()):
            return self._contiguous(self._store(value))
        return f"&{self.buffers[number].access(str(int(addresses[0]) & ((1 << BUFFER_BITS) - 1)))}", number

    # Statements

    def _assign(self, target: _Buffer, value: Expression, places: Tensor | None = None, sign: str = "=") -> None:
        """target[places] = value, by default to all places in order."""
        addresses = target.addresses((target.size,)) if places is None else target.base + places
        leaves = [addresses, *(part.reshape(-1) for part in value.leaves)]
        loops = find_loops(leaves)
        texts = self._table_loop(target, leaves, value) if loops is None else []
        for loop in loops or []:
            if "".join(texts).count("\n") > 400:
                raise UnknownOperation("an irregular order of numbers")
            operands = [self._access(loop, k) for k in range(1, len(leaves))]
            if sign == "+=" and "0.0f" in operands and re.fullmatch(r"[\s()*{}\d]*", value.text):
                continue  # a product with 0
            text = re.sub(r"\{(\d+)\}", lambda match, o=operands: o[int(match[1])], value.text)
            place = place_text(loop.first[0] - target.base, loop.row_step[0], loop.step[0])
            texts.append(_loop_text(loop, f"{target.access(place)} {sign} {_bare(text)};"))
        number = target.base >> BUFFER_BITS
        read = {int(x) for part in value.leaves for x in torch.unique(part >> BUFFER_BITS)} & self.scratch.keys()
        read |= {number} & self.scratch.keys() if sign == "+=" else set()
        self.statements.append(("\n".join(texts), {number} & self.scratch.keys(), read))

    def _access(self, loop: Loop, k: int) -> str:
        first = loop.first[k]
        if first == ZERO:
            return "0.0f"
        buffer = self.buffers[first >> BUFFER_BITS]
        place = first - buffer.base
        row_step, step = loop.row_step[k] if loop.rows > 1 else 0, loop.step[k] if loop.columns > 1 else 0
        if buffer.values is not None and not row_step and not step:
            return literal(float(buffer.values[place]))
        return buffer.access(place_text(place, row_step, step))

    def _table_loop(self, target: _Buffer, leaves: list[Tensor], value: Expression) -> list[str]:
        """One loop that reads irregular places from tables."""
        operands = []
        for addresses in leaves:
            numbers = torch.unique(addresses >> BUFFER_BITS)
            if len(numbers) != 1 or int(numbers[0]) < 0:
                raise UnknownOperation("an irregular order of numbers")
            buffer = self.buffers[int(numbers[0])]
            places, size = addresses - buffer.base, len(addresses)
            step = int(places[1] - places[0]) if size > 1 else 0
            if bool((places.diff() == step).all()):
                operands.append(buffer.access(place_text(int(places[0]), 0, step)))
            else:
                kind = "uint16_t" if int(places.max()) < 1 << 16 else "uint32_t"
                operands.append(buffer.access(f"{self._table(kind, places)}[i]"))
        text = re.sub(r"\{(\d+)\}", lambda match: operands[1 + int(match[1])], value.text)
        return [f"for (int i = 0; i < {len(leaves[0])}; i++) {target.access('i')} = {_bare(text)};"]

    def _call(self, function: str, arguments: str, target: _Buffer, read: int | None) -> None:
        written = {target.base >> BUFFER_BITS}
        text = f"NAME_{function}({arguments});"
        self.statements.append((text, written, {read} & self.scratch.keys()))

    # Operations

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        costly = isinstance(result, Expression) and re.sub(r"\{\d+\}", "", result.text) != ""
        return self._store(result) if costly and len(n.users) > 1 else result

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if not holds(args):
            return super().call_function(target, args, kwargs)
        if target is operator.getitem:
            return args[0][args[1]]
        if target is aten.sym_size.int:
            return args[0].shape[args[1]]
        if target in _COPIES:
            if kwargs.get("dtype") not in (None, torch.float32):
                raise UnknownOperation(f"a conversion to {kwargs['dtype']}")
            return args[0]
        if target in MOVES:
            return self._move(target, args, kwargs)
        if target is aten.masked_fill.Scalar and isinstance(args[1], Tensor) and args[2] == 0:
            value = args[0] if args[0].text == "{0}" else self._store(args[0])
            return value.move(lambda addresses: addresses.masked_fill(args[1], ZERO))
        if target is aten.embedding.default:
            return self._embedding(*args[:2])
        if target is aten.linear.default:
            return self._linear(*args)
        if target in _NORMS:
            return self._norm(_NORMS[target], args)
        if target in _SUMS:
            return self._sum(target, *args)
        found = elementwise(target, args, kwargs)
        if found is None:
            raise UnknownOperation(str(target))
        return combine(found[0], [self._operand(operand) for operand in found[1]])

    def _move(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if isinstance(args[0], list | tuple):  # cat, stack
            parts = [self._operand(part) for part in args[0]]
            parts = [part if part.text == "{0}" else self._store(part) for part in parts]
            return leaf(target([part.leaves[0] for part in parts], *args[1:], **kwargs))
        if any(isinstance(argument, Expression) for argument in args[1:]):
            raise UnknownOperation(f"{target} with places that depend on the state")
        value, *rest = args
        result = target(torch.zeros(value.shape), *rest, **kwargs)
        if isinstance(result, Tensor):
            return value.move(lambda addresses: target(addresses, *rest, **kwargs))
        return [value.move(lambda a, k=k: target(a, *rest, **kwargs)[k]) for k in range(len(result))]

    def _embedding(self, weight: Tensor, ids: Expression) -> Expression:
        if self.reads_values or ids.shape.numel() != 1 or int(ids.leaves[0].reshape(-1)[0]) != self.token:
            raise UnknownOperation("an embedding of something else than the token")
        table, scale = self._rows(weight)
        width = weight.shape[1]
        buffer = self._new_scratch((width,))
        text = f"{buffer.access('i')} = {scale}[id] * (float){table}[(long)id * {width} + i];"
        written = {buffer.base >> BUFFER_BITS}
        self.statements.append((f"for (int i = 0; i < {width}; i++) {text}", written, set()))
        return leaf(buffer.addresses((*ids.shape, width)))

    def _linear(self, value: Expression, weight: Tensor, bias: Tensor | None = None) -> Expression:
        if isinstance(weight, Expression):
            raise UnknownOperation("a linear map whose weight depends on the state")
        outputs, inputs = weight.shape
        if value.shape.numel() != inputs:
            raise UnknownOperation("a linear map of several vectors")
        place, number = self._contiguous(value)
        table, scale = self._rows(weight)
        buffer = self._new_scratch((outputs,))
        arguments = f"{table}, {scale}, {self._vector(bias)}, {place}, &{buffer.access('0')}, {outputs}, {inputs}"
        self._call("linear", arguments, buffer, number)
        return leaf(buffer.addresses((*value.shape[:-1], outputs)))

    def _norm(self, function: str, args: tuple) -> Expression:
        value, sizes, weight, *rest = (*args, None)
        size = int(torch.Size(sizes).numel())
        bias = rest[0] if function == "layer_norm" else None
        eps = rest[1] if function == "layer_norm" else rest[0]
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        place, number = self._contiguous(value)
        buffer = self._new_scratch(value.shape)
        for begin in range(0, buffer.size, size):
            arguments = (
                f"{self._vector(weight)}, {self._vector(bias)}, {literal(eps)}, {place} + {begin}, "
                f"&{buffer.access(str(begin))}, {size}"
            ).replace(" + 0,", ",", 1)
            self._call(function, arguments, buffer, number)
        return leaf(buffer.addresses(value.shape))

    def _sum(self, target: Any, value: Expression, dims=None, keepdim: bool = False) -> Expression:
        dims = [d % len(value.shape) for d in (range(len(value.shape)) if dims is None else dims)]
        kept = [d for d in range(len(value.shape)) if d not in dims]
        terms = value.move(lambda addresses: addresses.permute(*dims, *kept).reshape(-1))
        shape = [
            1 if keepdim and d in dims else value.shape[d] for d in range(len(value.shape)) if d in kept or keepdim
        ]
        buffer = self._new_scratch(shape)
        self._assign(buffer, Expression(torch.Size((buffer.size,)), "0.0f"))
        repeats = value.shape.numel() // buffer.size
        self._assign(buffer, terms, torch.arange(buffer.size).repeat(repeats), "+=")
        total = leaf(buffer.addresses(shape))
        return combine("({0} * {1})", [total, self._operand(1 / repeats)]) if target is aten.mean.dim else total

    # State

    def _is_shift(self, state: _Buffer, part: Expression) -> bool:
        """True where the new state can be written in place: it reads itself at or after each place, and no other."""
        for addresses in part.leaves:
            flat = addresses.reshape(-1)
            of_states = torch.zeros_like(flat, dtype=torch.bool)
            for other in self.states:
                inside = (flat >> BUFFER_BITS) == (other.base >> BUFFER_BITS)
                if other is not state and bool(inside.any()):
                    return False
                of_states |= inside
            if bool((of_states & (flat < state.base + torch.arange(len(flat)))).any()):
                return False
        return True

    def _only_keeps(self, state: _Buffer, part: Expression) -> bool:
        """True for a buffer: a part of the old state moved on, and new numbers."""
        if part.text != "{0}":
            return False
        own = (part.leaves[0] >> BUFFER_BITS) == (state.base >> BUFFER_BITS)
        return bool(own.any())


def _bare(text: str) -> str:
    """The text without parentheses around all of it."""
    if not text.startswith("("):
        return text
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[1:-1] if place == len(text) - 1 else text
    return text


def _loop_text(loop: Loop, statement: str) -> str:
    if loop.columns == 1 and loop.rows == 1:
        return statement
    if loop.rows == 1:
        return f"for (int i = 0; i < {loop.columns}; i++) {statement}"
    inner = f"for (int i = 0; i < {loop.columns}; i++) {statement}" if loop.columns > 1 else statement
    return f"for (int row = 0; row < {loop.rows}; row++) {inner}"


def allocate(statements: list[tuple[str, set[int], set[int]]], sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Places of scratch buffers in one array, of which those that are not used at the same time share memory."""
    first, last = {}, {}
    for time, (_, written, read) in enumerate(statements):
        for number in written | read:
            first.setdefault(number, time)
            last[number] = time
    places: dict[int, int] = {}
    for number in sorted(first, key=lambda number: (-sizes[number], first[number])):
        taken = sorted(
            (places[other], places[other] + sizes[other])
            for other in places
            if first[other] <= last[number] and first[number] <= last[other]
        )
        place = 0
        for begin, end in taken:
            if place + sizes[number] <= begin:
                break
            place = max(place, end)
        places[number] = place
    return places, max((places[number] + sizes[number] for number in places), default=0)


def c_source(program: ExportedProgram, name: str, state_names: list[str], note: str = "") -> str:
    """The C99 file of one step.

    It declares `struct NAME_state`, `NAME_reset(state)` and `NAME_step(state, id, outputs)`; with real-valued inputs
    the second argument is `const float *values`.

    Args:
        program: of [`export_step`], float32.
        name: prefix of all names; an identifier of C.
        state_names: of the parts of the state, in the program's order.
        note: lines for the comment at the top.

    Raises:
        ValueError: an operation of the step has no form in C.
    """
    writer = CWriter(program, state_names)
    try:
        writer.write()
    except UnknownOperation as error:
        raise ValueError(f"The step has no form in C: it needs {error}.") from error
    places, scratch = allocate(writer.statements, {number: b.size for number, b in writer.scratch.items()})
    body = writer.body(places)
    helpers = [text for helper, text in HELPERS.items() if re.search(rf"NAME_{helper}\(", body)]
    fields = "\n".join(
        f"    {'uint16_t' if half else 'float'} {field}[{state.size}];"
        for field, half, state in zip(writer.fields, writer.halves, writer.states, strict=True)
    )
    comment = "\n".join(f" * {line}".rstrip() for line in note.splitlines())
    argument = "const float *values" if writer.reads_values else "int id"
    reads = f"`values` has {writer.num_inputs} numbers" if writer.reads_values else "`id` is the next token"
    resets = "\n".join(
        f"    for (int i = 0; i < {state.size}; i++) state->{field}[i] = 0;"
        for field, state in zip(writer.fields, writer.states, strict=True)
    )
    work = f"    float work[{scratch}];\n" if scratch else ""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    text = f"""/*
{comment}
 * C99. Link with -lm. Nothing is allocated; the step needs {4 * scratch} bytes of stack for its numbers.
 */
#include <math.h>
#include <stdint.h>

#define NAME_INPUTS {writer.num_inputs}
#define NAME_OUTPUTS {writer.num_outputs}

struct NAME_state {{
{fields}
}};

/* The state where a sequence begins. */
void NAME_reset(struct NAME_state *state);
/* One step: {reads}; `outputs` gets {writer.num_outputs} numbers. */
void NAME_step(struct NAME_state *state, {argument}, float *outputs);

{chr(10).join(writer.tables)}

{(chr(10) * 2).join(helpers)}

void NAME_reset(struct NAME_state *state) {{
{resets}
}}

void NAME_step(struct NAME_state *state, {argument}, float *outputs) {{
{work}{indented}
}}
"""
    text = re.sub(r"\bNAME_(INPUTS|OUTPUTS)\b", lambda match: f"{name.upper()}_{match[1]}", text)
    return re.sub(r"\bNAME_", f"{name}_", text)
