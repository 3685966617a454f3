"""One step of a model as a C99 file: int8 tables for weights, the state in a struct, nothing allocated.

The exported program is lowered to a StepGraph, as for the compiled step, and the graph is printed. What depends on
weights only is computed here. Weights of linear maps, embeddings and taps become int8, symmetric, with a scale for
each output channel; vectors stay float. A part of the state that only keeps elements for later steps, such as the
buffer of a convolution, is stored in half precision; parts that are computed anew in every step stay float.
"""

import re
from textwrap import indent
from typing import NamedTuple

import torch
from torch.export import ExportedProgram

from hf_recurrent.export.c_footprint import Footprint, code_bytes
from hf_recurrent.export.c_helpers import helpers_of
from hf_recurrent.export.c_printer import CPrinter, Memory, Statement
from hf_recurrent.export.c_tables import Weights, collect_weights, used_tables
from hf_recurrent.kernels.step_graph import ComplexValue, UnsupportedOp
from hf_recurrent.kernels.step_trace import StepTrace


class CFile(NamedTuple):
    """An exported step.

    Args:
        text: C.
        weights: the content of the file with the weights if they are not in the text.
        footprint: of the step.
    """

    text: str
    weights: bytes | None
    footprint: Footprint


def c_step(
    program: ExportedProgram, name: str, state_names: list[str], note: str = "", *, separate_weights: bool = False
) -> CFile:
    """The C99 file of one step.

    It declares `struct NAME_state`, `NAME_reset(state)` and `NAME_step(state, id, outputs)`, which returns 0, or 1 for
    an id outside of the vocabulary; with real-valued inputs the second argument is `const float *values`.

    Args:
        program: of [`export_step`] with `own_operators=True`, float32.
        name: prefix of all names; an identifier of C.
        state_names: of the parts of the state, in the program's order.
        note: lines for the comment at the top.
        separate_weights: put the weights into a binary file. Then `NAME_load(file, size)` checks its bytes and returns
            a pointer for the second argument of `NAME_step`.

    Raises:
        ValueError: the step has an unsupported operator, or the weights are not float32.
    """
    try:
        printer = _printed(program, state_names)
    except UnsupportedOp as error:
        raise ValueError(f"The step cannot be exported to C: unsupported operator: {error}.") from error
    return c_file(printer, name, note, separate_weights=separate_weights)


def _printed(program: ExportedProgram, state_names: list[str]) -> CPrinter:
    """The statements of one step."""
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    inputs = inputs[-1 - len(state_names) :]  # weights come first
    if any(value.is_floating_point() and value.dtype != torch.float32 for value in inputs):
        raise ValueError("`model` must have float32 weights for C; call `model.float()` first.")
    names = ["values" if inputs[0].is_floating_point() else "ids", *(f"state {name}" for name in state_names)]
    examples = {
        name: torch.zeros(1, *value.shape[1:], dtype=value.dtype) for name, value in zip(names, inputs, strict=True)
    }
    module = program.module(check_guards=False)
    with torch.no_grad(), StepTrace(torch.float32, examples) as trace:
        results = [trace.value(result) for result in module(*examples.values())]
    if any(isinstance(value, ComplexValue) for value in results):
        raise UnsupportedOp("a complex output")
    outputs, *parts = (trace.graph.index(value).reshape(-1) for value in results)
    fields = {f"state {name}": re.sub(r"\W", "_", name) for name in state_names}
    printer = CPrinter(trace.graph, fields)
    printer.write(outputs, parts)
    return printer


def allocate(statements: list[Statement], memory: dict[int, Memory]) -> tuple[dict[int, int], int]:
    """Offsets of memory in one array, and the array's size; what is not used at the same time shares memory."""
    sizes, first, last = {number: one.size for number, one in memory.items()}, {}, {}
    for time, statement in enumerate(statements):
        for number in (statement.writes | statement.reads) & sizes.keys():
            first.setdefault(number, time)
            last[number] = time
    offsets: dict[int, int] = {}
    for number in sorted(first, key=lambda number: (-sizes[number], first[number])):
        taken = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if first[other] <= last[number] and first[number] <= last[other]
        )
        offset = 0
        for begin, end in taken:
            if offset + sizes[number] <= begin:
                break
            offset = max(offset, end)
        offsets[number] = offset
    return offsets, max((offsets[number] + sizes[number] for number in offsets), default=0)


def named(text: str, name: str) -> str:
    """C text, and names of files in it, with the prefix `name` in place of NAME, in capitals for macros."""
    text = re.sub(r"\bNAME_([A-Z_0-9]+)\b", lambda match: f"{name.upper()}_{match[1]}", text)
    return re.sub(r"\bNAME(_|\.)", rf"{name}\1", text)


def c_file(printer: CPrinter, name: str, note: str = "", *, separate_weights: bool = False) -> CFile:
    """The C99 file of a printed graph; `name` and `note` as in [`c_step`]."""
    (offsets, floats), (code_offsets, codes) = (
        allocate(printer.statements, part) for part in (printer.scratch, printer.codes)
    )
    body, weights = printer.body(offsets | code_offsets), None
    tables = used_tables(printer.tables, body)
    if separate_weights:
        weights, body = collect_weights(printer.tables, body)
        tables = [table for table in tables if table not in weights.tables]
    stack = 4 * floats + 2 * codes
    code = [
        *helpers_of(body),
        *([] if weights is None else [weights.definition()]),
        _reset(printer),
        _step(printer, body, floats, codes, weights),
    ]
    constants = sum(len(table.binary()) for table in tables) + (0 if weights is None else len(weights.file()))
    state = sum(state.size * (2 if half else 4) for half, state in zip(printer.halves, printer.states, strict=True))
    footprint = Footprint(code_bytes("\n".join(code)), constants, state, stack, printer.operations)
    parts = [_head(printer, note, weights), *(table.definition() for table in tables), *code]
    text = named("\n\n".join(part.rstrip("\n") for part in parts) + "\n", name)
    return CFile(footprint.commented(text), None if weights is None else weights.file(), footprint)


def _head(printer: CPrinter, note: str, weights: Weights | None) -> str:
    """Comment, macros and declarations."""
    comment = "\n".join(f" * {line}".rstrip() for line in note.splitlines())
    fields = "\n".join(
        f"    {'uint16_t' if half else 'float'} {field}[{state.size}];"
        for field, half, state in zip(printer.fields, printer.halves, printer.states, strict=True)
    )
    num_inputs = 1 if printer.values is None else printer.values.size
    macros = [f"#define NAME_INPUTS {num_inputs}", f"#define NAME_OUTPUTS {printer.num_outputs}"]
    reads = f"`values` has {num_inputs} elements"
    if printer.values is None:
        reads = "`id` is the next token"
        if printer.vocab_size is not None:
            macros.append(f"#define NAME_VOCAB_SIZE {printer.vocab_size}")
            reads += ", from 0 to NAME_VOCAB_SIZE - 1"
    includes = ["math.h", "stdint.h"] if weights is None else ["math.h", "stddef.h", "stdint.h", "string.h"]
    lines = "\n".join(f"#include <{header}>" for header in includes)
    declaration = "" if weights is None else weights.declaration()
    macros = "\n".join(macros)
    return f"""/*
{comment}
 * C99. Link with -lm. Nothing is allocated.
 */
{lines}

{macros}
{declaration}
struct NAME_state {{
{fields}
}};

/* The state where a sequence begins. */
void NAME_reset(struct NAME_state *state);
/* One step: {reads}; `outputs` gets {printer.num_outputs} elements.
 * Returns 0, or 1 if the input is not allowed; then nothing is written. */
{_signature(printer, weights)};
"""


def _signature(printer: CPrinter, weights: Weights | None) -> str:
    argument = "const float *values" if printer.values is not None else "int id"
    given = "" if weights is None else "const struct NAME_weights *weights, "
    return f"int NAME_step(struct NAME_state *state, {given}{argument}, float *outputs)"


def _reset(printer: CPrinter) -> str:
    lines = "\n".join(
        f"    for (int i = 0; i < {state.size}; i++) state->{field}[i] = 0;"
        for field, state in zip(printer.fields, printer.states, strict=True)
    )
    return f"void NAME_reset(struct NAME_state *state) {{\n{lines}\n}}"


def _step(printer: CPrinter, body: str, floats: int, codes: int, weights: Weights | None) -> str:
    memory = f"    float work[{floats}];\n" if floats else ""
    memory += f"    int16_t codes[{codes}];\n" if codes else ""
    checks = [] if weights is None else ["!weights"]
    if printer.vocab_size is not None:
        checks += ["id < 0", "id >= NAME_VOCAB_SIZE"]
    check = f"    if ({' || '.join(checks)}) return 1;\n" if checks else ""
    return f"{_signature(printer, weights)} {{\n{memory}{check}{indent(body, '    ')}\n    return 0;\n}}"
