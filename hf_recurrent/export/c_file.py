"""A printed graph as one C99 file, with its weights as text or in a binary file of their own."""

import re
from typing import NamedTuple

from hf_recurrent.export.c_footprint import Footprint, code_bytes
from hf_recurrent.export.c_helpers import helpers_of
from hf_recurrent.export.c_printer import CPrinter, Statement
from hf_recurrent.export.c_tables import Weights, collect_weights, used_tables


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


def allocate(statements: list[Statement], sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Offsets in one array of the memory with these sizes, and the size of the array.

    What is not used at the same time shares memory.
    """
    first, last = {}, {}
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
        allocate(printer.statements, {number: memory.size for number, memory in part.items()})
        for part in (printer.scratch, printer.codes)
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
    macros = [f"#define NAME_INPUTS {_num_inputs(printer)}", f"#define NAME_OUTPUTS {printer.num_outputs}"]
    reads = f"`values` has {_num_inputs(printer)} elements"
    if printer.values is None:
        reads = "`id` is the next token"
        if printer.vocab_size is not None:
            macros.append(f"#define NAME_VOCAB_SIZE {printer.vocab_size}")
            reads += ", from 0 to NAME_VOCAB_SIZE - 1"
    includes = ["math.h", "stdint.h"] if weights is None else ["math.h", "stddef.h", "stdint.h", "string.h"]
    lines = "\n".join(f"#include <{header}>" for header in includes)
    declaration = "" if weights is None else f"{weights.declaration()}"
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


def _num_inputs(printer: CPrinter) -> int:
    return printer.values.size if printer.values is not None else 1


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
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return f"{_signature(printer, weights)} {{\n{memory}{check}{lines}\n    return 0;\n}}"
