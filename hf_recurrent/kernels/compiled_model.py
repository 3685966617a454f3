"""One step of a model as a program of the kernel: recorded, compiled and compared with `forward` once.

Shape letters: B streams, M model width, V vocabulary.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .step_cpu import StepProgram
from .step_graph import ComplexValue, UnsupportedOp
from .step_trace import StepTrace

# (embedded inputs (B, 1, M) or token ids (B, 1), state) → (outputs (B, 1, …), new state)
Forward = Callable[[Tensor, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]
_CHECKED_STREAMS = 3
_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-8}


def compile_model_step(
    forward: Forward,
    width: int,
    dtype: torch.dtype,
    state_shapes: Mapping[str, torch.Size],
    vocab_size: int | None = None,
    weights: str | None = None,
) -> StepProgram:
    """Compile one step to a program with the inputs "hidden" (or "ids") and the state, and "output".

    Args:
        forward: the step.
        width: M.
        dtype: of the model.
        state_shapes: of one stream.
        vocab_size: V, if the step reads token ids.
        weights: the type in which large weights are stored; None for the model's.

    Raises:
        UnsupportedOp: the kernel does not support an operator, or the program computes something else than `forward`.
        UnreadableTensor: a weight is not in memory.
    """
    generator = torch.Generator().manual_seed(0)
    if vocab_size is None:
        kind, example = "hidden", torch.randn(_CHECKED_STREAMS, 1, width, generator=generator, dtype=dtype)
    else:
        kind, example = "ids", torch.randint(vocab_size, (_CHECKED_STREAMS, 1), generator=generator)
    # A state that such inputs led to.
    state = {part: torch.zeros(_CHECKED_STREAMS, *shape[1:], dtype=dtype) for part, shape in state_shapes.items()}
    state = {part: tensor.contiguous() for part, tensor in forward(example.flip(0), state)[1].items()}
    one = {part: tensor[:1].clone() for part, tensor in state.items()}
    first = example[:1].clone()
    trace = StepTrace(dtype, {kind: first, **one})
    with trace:
        output, new_state = forward(first, one)
    values = {"output": trace.value(output), **{name: trace.value(new_state[name]) for name in state_shapes}}
    for name, value in values.items():
        if isinstance(value, ComplexValue) or value is None:
            raise UnsupportedOp(f"the output {name}")
        if name in state_shapes and value.shape != state_shapes[name]:
            raise UnsupportedOp(f"the shape of {name}")
    program = StepProgram(trace.graph, values, trace.guards, weights, trace.owner)
    if weights is None:
        _compare(program, forward, {kind: example}, state)
    return program


def _compare(program: StepProgram, forward: Forward, example: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    expected, expected_state = forward(*example.values(), state)
    found = program.run({**example, **state}, _CHECKED_STREAMS)
    for name, tensor in {"output": expected, **expected_state}.items():
        difference = (found[name].reshape(tensor.shape) - tensor).abs()
        if not tensor.numel():
            continue
        close = difference <= _TOLERANCES[tensor.dtype] * tensor.abs().amax().clamp_min(1e-6)
        if not bool((close | (tensor.isnan() & found[name].reshape(tensor.shape).isnan())).all()):
            raise UnsupportedOp(f"`forward`, whose {name} differs between streams or steps in its operations")
