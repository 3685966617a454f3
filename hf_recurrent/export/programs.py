"""`export_step` and `export_block`: one call of a model as an exported program, in real numbers.

Shape letters: B streams, T steps, S state width, V vocabulary.
"""

import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedModel

from hf_recurrent.export.real_pairs import ComplexOperation, RealModule, has_complex
from hf_recurrent.export.step_module import StepLoop, StepModule
from hf_recurrent.export.weight_types import WeightLoader
from hf_recurrent.modeling.block.recurrent_backbone import RecurrentModel
from hf_recurrent.modeling.contexts.ngram_embedding import ngram_rows
from hf_recurrent.modeling.units.nonlinear_units import SequentialUnit

# Example sizes that represent any size: torch specialises 0 and 1, and small sizes meet sizes of layers.
_STREAMS, _STEPS = 2, 37
MAX_STREAMS = 1 << 16
# log2 of the longest block: the number of rounds is part of the program, T is not.
_ROUNDS = 16
LONGEST_BLOCK = 1 << _ROUNDS
# Metadata of operations: source locations on this machine, and earlier forms of the graph.
_LOCAL_METADATA = ("stack_trace", "from_node", "source_fn_stack")


def export_step(
    model: PreTrainedModel,
    *,
    weights: str | None = None,
    max_streams: int = MAX_STREAMS,
    own_operators: bool = False,
) -> ExportedProgram:
    """One step of a model: (token ids (B,), state …) → (logits (B, V), new state …), for any B.

    The parts of the state come in the order of `model.init_state()`. A model that reads real values takes them,
    (B, I), in place of token ids; a base model returns its hidden state in place of logits. Complex numbers are pairs
    of real ones, so that all runtimes can run the program.

    Args:
        model: a recurrent model of this package, of any family, with or without a head.
        weights: "int8" or "bfloat16" to store linear maps and the embedding so; by default as they are.
        max_streams: the largest B, for which some runtimes reserve memory.
        own_operators: keep this package's operator that hashes n-grams, for [`c_step`]; by default it becomes
            operators of torch.

    Raises:
        TypeError: the model is of another kind.
        ValueError: an operation of the model cannot be exported; `weights` is unknown.
    """
    return _export(StepModule(model), weights, max_streams, own_operators)


def export_block(model: PreTrainedModel, *, weights: str | None = None) -> ExportedProgram:
    """A block of T steps: (token ids (B, T), state …) → (logits (B, T, V), new state …), for any B and T ≥ 1.

    T is at most 65,536. Linear recurrences are a scan of O(T log T) operations, parallel over T. Other models (GRU,
    IndRNN, SMT's RNN, convolutions by Fourier transforms) become a loop over their step.

    Raises:
        TypeError, ValueError: as [`export_step`].
    """
    module = StepModule(model, takes_blocks=True)
    if isinstance(module.backbone, RecurrentModel) and not any(
        isinstance(part, SequentialUnit) for part in module.modules()
    ):
        try:
            return _export(module, weights)
        except ValueError:
            pass  # the loop needs less of torch, and its error is the step's
    step = export_step(model, weights=weights).module(check_guards=False)
    _register_constants(step)
    with torch.no_grad(), quietly():
        return _trace(StepLoop(step), module.example_inputs(_STREAMS, _STEPS), takes_blocks=True)


def _register_constants(module: nn.Module) -> None:
    """Make buffers of all tensors that are plain attributes: torch's loop cannot be traced with others."""
    for part in module.modules():
        for name in [name for name, value in vars(part).items() if isinstance(value, Tensor)]:
            value = part.__dict__.pop(name)
            part.register_buffer(name, value)


def _export(
    module: StepModule, weights: str | None, max_streams: int = MAX_STREAMS, own_operators: bool = False
) -> ExportedProgram:
    loader = WeightLoader(weights)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), quietly():
            return _in_real_numbers(module, loader, max_streams, own_operators)
    except (ComplexOperation, RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        name = type(module.backbone).__name__
        what = "a block" if module.takes_blocks else "a step"
        raise ValueError(
            f"`model` is a {name}, of which {what} cannot be exported: {_place(error)}{first_line(error)}."
        ) from error
    finally:
        for part, training in modes.items():
            part.training = training


def first_line(error: BaseException) -> str:
    """The first line of a message, or the error's type, for the end of a sentence."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__).rstrip(".")


def _place(error: BaseException) -> str:
    """The last line of the model's code in a traceback, for a message; nothing if the error is not from there."""
    own = [Path(torch.__file__).parent, Path(__file__).parent]
    frames = traceback.extract_tb(error.__traceback__)
    of_model = [frame for frame in frames if not any(folder in Path(frame.filename).parents for folder in own)]
    if not of_model or not of_model[-1].line:
        return ""
    frame = of_model[-1]
    return f"`{frame.line}` ({Path(frame.filename).name}, line {frame.lineno}): "


def _in_real_numbers(
    module: StepModule, loader: WeightLoader, max_streams: int, own_operators: bool
) -> ExportedProgram:
    examples, blocks = module.example_inputs(_STREAMS, _STEPS), module.takes_blocks
    decompositions = {torch.ops.hf_recurrent.linear_scan.default: scan_by_doubling} if blocks else {}
    if not own_operators:
        decompositions |= {torch.ops.hf_recurrent.ngram_rows.default: ngram_rows}
    program = _trace(module, examples, blocks, max_streams).run_decompositions(decompositions)
    if loader.type is not None or has_complex(program):
        real = RealModule(program, loader.bind(program))
        program = _trace(real, examples, blocks, max_streams).run_decompositions({})
    _clean(program.graph_module)
    return program


def _clean(graph_module: torch.fx.GraphModule) -> None:
    """Remove source locations, and assertions of types, a fifth of the nodes."""
    for node in list(graph_module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph_module.graph.erase_node(node)
        for name in _LOCAL_METADATA:
            node.meta.pop(name, None)
    graph_module.recompile()


def _trace(
    module: nn.Module, examples: tuple[Tensor, ...], takes_blocks: bool, max_streams: int = MAX_STREAMS
) -> ExportedProgram:
    streams = Dim("streams", min=1, max=max_streams)
    of_inputs = {0: streams}
    if takes_blocks:
        of_inputs[1] = Dim("steps", min=1, max=LONGEST_BLOCK)
    shapes = {"inputs": of_inputs, "state": tuple({0: streams} for _ in examples[1:])}
    return torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)


def scan_by_doubling(
    a: Tensor, b: Tensor, initial_state: Tensor, reset_mask: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """h_t = a_t ∘ h_{t-1} + b_t by recursive doubling (Hillis and Steele 1986), for T up to [`LONGEST_BLOCK`].

    Multiplications and additions only, so that decays of zero and of either sign are exact.

    Args:
        a, b: (B, T, S) of one type.
        initial_state: (B, S), of the same type or wider.
        reset_mask: (B, T) bool, or None.
        backend: ignored.

    Returns:
        h (B, T, S) in the type of `a`, and the final state (B, S) in the type of `initial_state`.
    """
    decay, value = a.to(initial_state.dtype), b.to(initial_state.dtype)
    if reset_mask is not None:
        decay = decay.masked_fill(reset_mask.unsqueeze(-1), 0)
    steps = a.shape[1]
    for number in range(_ROUNDS):
        before = (0, 0, 1 << number, 0)
        value = value + decay * torch.constant_pad_nd(value, before)[:, :steps]
        decay = decay * torch.constant_pad_nd(decay, before, 1)[:, :steps]
    states = value + decay * initial_state.unsqueeze(1)
    return states.to(a.dtype), states[:, -1].clone()


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Inside the block, Python's own output, warnings and log messages below errors are dropped. Not for threads."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.CRITICAL))
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
