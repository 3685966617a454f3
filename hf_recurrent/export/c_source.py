"""One step of a model as a C99 file: int8 tables for weights, the state in a struct, nothing allocated.

The exported program is lowered to a StepGraph, as for the compiled step, and the graph is printed. What depends on
weights only is computed here. Weights of linear maps, embeddings and taps become int8, symmetric, with a scale for
each output channel; vectors stay float. A part of the state that only keeps elements for later steps, such as the
buffer of a convolution, is stored in half precision; parts that are computed anew in every step stay float.
"""

import re

import torch
from torch.export import ExportedProgram

from hf_recurrent.export.c_helpers import helpers_of
from hf_recurrent.export.c_printer import CPrinter, Statement
from hf_recurrent.kernels.step_graph import ComplexValue, UnsupportedOp
from hf_recurrent.kernels.step_trace import StepTrace


def print_step(program: ExportedProgram, state_names: list[str]) -> CPrinter:
    """The statements of one step.

    Args:
        program: of [`export_step`], float32.
        state_names: of the parts of the state, in the program's order.

    Raises:
        ValueError: the weights are not float32.
        UnsupportedOp: an operator cannot be printed.
    """
    inputs = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    inputs = inputs[-1 - len(state_names) :]  # weights come first
    if any(value.is_floating_point() and value.dtype != torch.float32 for value in inputs):
        raise ValueError("`model` must have float32 weights for C; call `model.float()` first.")
    names = ["values" if inputs[0].is_floating_point() else "ids", *(f"state {name}" for name in state_names)]
    named = {
        name: torch.zeros(1, *value.shape[1:], dtype=value.dtype) for name, value in zip(names, inputs, strict=True)
    }
    module = program.module(check_guards=False)
    with torch.no_grad(), StepTrace(torch.float32, named) as trace:
        results = [trace.value(result) for result in module(*named.values())]
    if any(isinstance(value, ComplexValue) for value in results):
        raise UnsupportedOp("a complex output")
    outputs, *parts = (trace.graph.index(value).reshape(-1) for value in results)
    fields = {f"state {name}": re.sub(r"\W", "_", name) for name in state_names}
    printer = CPrinter(trace.graph, fields)
    printer.write(outputs, parts)
    return printer


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


def c_source(program: ExportedProgram, name: str, state_names: list[str], note: str = "") -> str:
    """The C99 file of one step.

    It declares `struct NAME_state`, `NAME_reset(state)` and `NAME_step(state, id, outputs)`; with real-valued inputs
    the second argument is `const float *values`.

    Args:
        program: of [`export_step`] with `own_operators=True`, float32.
        name: prefix of all names; an identifier of C.
        state_names: of the parts of the state, in the program's order.
        note: lines for the comment at the top.

    Raises:
        ValueError: the step has an unsupported operator, or the weights are not float32.
    """
    try:
        printer = print_step(program, state_names)
    except UnsupportedOp as error:
        raise ValueError(f"The step cannot be exported to C: unsupported operator: {error}.") from error
    return c_file(printer, name, note)


def c_file(printer: CPrinter, name: str, note: str = "") -> str:
    """The C99 file of a printed graph; see [`c_source`]."""
    (offsets, scratch), (code_offsets, codes) = (
        allocate(printer.statements, {number: memory.size for number, memory in part.items()})
        for part in (printer.scratch, printer.codes)
    )
    body = printer.body(offsets | code_offsets)
    helpers = helpers_of(body)
    # Constants that no statement reads are left out: compilers warn of them.
    used = set(re.findall(r"NAME_(?:table|vector|offsets)_\d+", body))
    tables = "\n".join(text for table, text in printer.tables.items() if table in used)
    num_inputs = printer.values.size if printer.values is not None else 1
    num_outputs = printer.num_outputs
    fields = "\n".join(
        f"    {'uint16_t' if half else 'float'} {field}[{state.size}];"
        for field, half, state in zip(printer.fields, printer.halves, printer.states, strict=True)
    )
    comment = "\n".join(f" * {line}".rstrip() for line in note.splitlines())
    argument = "const float *values" if printer.values is not None else "int id"
    reads = f"`values` has {num_inputs} elements" if printer.values is not None else "`id` is the next token"
    resets = "\n".join(
        f"    for (int i = 0; i < {state.size}; i++) state->{field}[i] = 0;"
        for field, state in zip(printer.fields, printer.states, strict=True)
    )
    work = f"    float work[{scratch}];\n" if scratch else ""
    work += f"    int16_t codes[{codes}];\n" if codes else ""
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    text = f"""/*
{comment}
 * C99. Link with -lm. Nothing is allocated; intermediate results need {4 * scratch + 2 * codes} bytes of stack.
 */
#include <math.h>
#include <stdint.h>

#define NAME_INPUTS {num_inputs}
#define NAME_OUTPUTS {num_outputs}

struct NAME_state {{
{fields}
}};

/* The state where a sequence begins. */
void NAME_reset(struct NAME_state *state);
/* One step: {reads}; `outputs` gets {num_outputs} elements. */
void NAME_step(struct NAME_state *state, {argument}, float *outputs);

{tables}

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
