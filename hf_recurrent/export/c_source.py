"""One step of a model as a C99 file: int8 tables for weights, the state in a struct, nothing allocated.

The exported program is lowered to a StepGraph, as for the compiled step, and the graph is printed. What depends on
weights only is computed here. Weights of linear maps, embeddings and taps become int8, symmetric, with a scale for
each output channel; vectors stay float. A part of the state that only keeps elements for later steps, such as the
buffer of a convolution, is stored in half precision; parts that are computed anew in every step stay float.
"""

import re

import torch
from torch.export import ExportedProgram

from hf_recurrent.export.c_file import CFile, c_file
from hf_recurrent.export.c_printer import CPrinter
from hf_recurrent.kernels.step_graph import ComplexValue, UnsupportedOp
from hf_recurrent.kernels.step_trace import StepTrace


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
