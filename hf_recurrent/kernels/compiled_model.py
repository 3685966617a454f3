"""One step of a model as a program of the kernel: recorded, compiled and compared with `forward` once.

Shape letters: B streams, M model width.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .step_cpu import StepProgram
from .step_graph import ComplexValue, UnsupportedOp
from .step_trace import StepTrace

# (embedded inputs (B, 1, M), state) → (outputs (B, 1, …), new state)
Forward = Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
_CHECKED_STREAMS = 3
_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-8}


def compile_model_step(
    forward: Forward,
    width: int,
    dtype: torch.dtype,
    state_shapes: Mapping[str, torch.Size],
    table: Tensor | None = None,
    weights: str | None = None,
) -> StepProgram:
    """Compile one step to a program with the inputs "hidden" (or "ids", with a table) and the state, and "output".

    Args:
        forward: the step.
        width: M.
        dtype: of the model.
        state_shapes: of one stream.
        table: (V, M), the embedding of token ids.
        weights: the type in which large weights are stored; None for the model's.

    Raises:
        UnsupportedOp: the kernel does not support an operator, or the program computes something else than `forward`.
        UnreadableTensor: a weight is not in memory.
    """
    generator = torch.Generator().manual_seed(0)
    ids = None
    if table is not None:
        ids = torch.randint(len(table), (_CHECKED_STREAMS,), generator=generator)
    example, state = _example(forward, width, dtype, state_shapes, table, ids, generator)
    one = {name: tensor[:1].clone() for name, tensor in state.items()}
    hidden = example[:1].clone()
    trace = StepTrace(dtype, {"hidden": hidden, **one}, table)
    with trace:
        output, new_state = forward(hidden, one)
    values = {"output": trace.value(output), **{name: trace.value(new_state[name]) for name in state_shapes}}
    for name, value in values.items():
        if isinstance(value, ComplexValue) or value is None:
            raise UnsupportedOp(f"the output {name}")
        if name in state_shapes and value.shape != state_shapes[name]:
            raise UnsupportedOp(f"the shape of {name}")
    program = StepProgram(trace.graph, values, trace.guards, weights, trace.owner)
    if weights is None:
        _compare(program, forward, example, ids, state)
    return program


def _example(forward, width, dtype, state_shapes, table, ids, generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Inputs of a few streams, and a state that such inputs led to."""
    if table is None:
        hidden = torch.randn(_CHECKED_STREAMS, 1, width, generator=generator, dtype=dtype)
    else:
        hidden = torch.nn.functional.embedding(ids, table).unsqueeze(1).detach()
    state = {name: torch.zeros(_CHECKED_STREAMS, *shape[1:], dtype=dtype) for name, shape in state_shapes.items()}
    _, state = forward(hidden.flip(0), state)
    return hidden, {name: tensor.contiguous() for name, tensor in state.items()}


def _compare(program: StepProgram, forward: Forward, hidden: Tensor, ids: Tensor | None, state: dict) -> None:
    expected, expected_state = forward(hidden, state)
    inputs = {"hidden": hidden} if ids is None else {"ids": ids}
    found = program.run({**inputs, **state}, _CHECKED_STREAMS)
    for name, tensor in {"output": expected, **expected_state}.items():
        difference = (found[name].reshape(tensor.shape) - tensor).abs()
        if not tensor.numel():
            continue
        close = difference <= _TOLERANCES[tensor.dtype] * tensor.abs().amax().clamp_min(1e-6)
        if not bool((close | (tensor.isnan() & found[name].reshape(tensor.shape).isnan())).all()):
            raise UnsupportedOp(f"`forward`, whose {name} differs between streams or steps in its operations")
