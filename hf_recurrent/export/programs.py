"""`export_step` and `export_block`: one call of a model as an exported program, in real numbers.

Shape letters: B streams, T steps, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import PreTrainedConfig, PreTrainedModel

from hf_recurrent.export.real_pairs import ComplexOperation, RealModule, has_complex
from hf_recurrent.export.scan_decomposition import LONGEST_BLOCK, scan_decompositions
from hf_recurrent.export.step_module import StepModule
from hf_recurrent.export.weight_types import WeightLoader
from hf_recurrent.modeling.nonlinear_units import SequentialUnit
from hf_recurrent.modeling.recurrent_causal_lm import RecurrentModel

# The sizes that stand for any: torch specialises 0 and 1, and small sizes meet those of layers.
_STREAMS, _STEPS = 2, 37
MOST_STREAMS = 1 << 16


def export_step(model: PreTrainedModel, *, weights: str | None = None) -> ExportedProgram:
    """One step of a model: (token ids (B,), state …) → (logits (B, V), new state …), for any B.

    The parts of the state come in the order of `model.init_state()`. A model that reads real values takes them,
    (B, I), in place of token ids; a base model returns its hidden state in place of logits. Complex numbers are pairs
    of real ones, so that all runtimes can run the program.

    Args:
        model: a recurrent model of this package, of any family, with or without a head.
        weights: "int8" or "bfloat16" to store linear maps and the embedding so; by default as they are.

    Raises:
        TypeError: the model is of another kind.
        ValueError: an operation of the model cannot be exported; `weights` is unknown.
    """
    return _export(StepModule(model), weights)


def export_block(model: PreTrainedModel, *, weights: str | None = None) -> ExportedProgram:
    """A block of T steps: (token ids (B, T), state …) → (logits (B, T, V), new state …), for any B and T ≥ 2.

    T is at most 65,536, and the scan takes O(T log T) operations. In mGRADE, T is longer than the receptive field of
    every layer. Models whose steps are sequential (GRU, IndRNN, SMT's RNN) have no such program.

    Raises:
        TypeError, ValueError: as [`export_step`].
    """
    module = StepModule(model, takes_blocks=True)
    sequential = [type(part).__name__ for part in module.modules() if isinstance(part, SequentialUnit)]
    if not isinstance(module.backbone, RecurrentModel) or sequential:
        raise ValueError(
            f"`model` is a {type(module.backbone).__name__}, of which a block cannot be exported: the steps of its "
            f"{(sequential or ['memory'])[0]} are sequential; use `export_step`."
        )
    return _export(module, weights)


def _export(module: StepModule, weights: str | None) -> ExportedProgram:
    loader = WeightLoader(weights)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            return _in_real_numbers(module, loader)
    except (ComplexOperation, RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
        name = type(module.backbone).__name__
        what = "a block" if module.takes_blocks else "a step"
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise ValueError(f"`model` is a {name}, of which {what} cannot be exported: {reason.rstrip('.')}.") from error
    finally:
        module.train(was_training)


def _in_real_numbers(module: StepModule, loader: WeightLoader) -> ExportedProgram:
    shortest = _shortest_block(module.backbone.config) if module.takes_blocks else None
    examples = module.example_inputs(_STREAMS, _STEPS + (shortest or 0))
    program = _trace(module, examples, shortest)
    program = program.run_decompositions(scan_decompositions() if module.takes_blocks else {})
    if loader.type is not None or has_complex(program):
        real = RealModule(program, loader.bind(program))
        program = _trace(real, examples, shortest).run_decompositions({})
    return program


def _shortest_block(config: PreTrainedConfig) -> int:
    """Shorter blocks of mGRADE keep a part of the buffer, which is another graph."""
    fields = config.receptive_fields() if hasattr(config, "receptive_fields") else []
    return max([1, *fields]) + 1


def _trace(module: nn.Module, examples: tuple[Tensor, ...], shortest: int | None) -> ExportedProgram:
    streams = Dim("streams", min=1, max=MOST_STREAMS)
    of_inputs = {0: streams}
    if shortest is not None:
        of_inputs[1] = Dim("steps", min=shortest, max=LONGEST_BLOCK)
    shapes = {"inputs": of_inputs, "state": tuple({0: streams} for _ in examples[1:])}
    return torch.export.export(module, examples, dynamic_shapes=shapes, strict=False)
