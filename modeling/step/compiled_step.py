"""One token of every stream as one call of the compiled kernel: one pass over the weights.

The kernel's package records one step of `forward` and compiles it to a program. Without the kernel, or with an
operator that it does not support, plain `forward` runs.

Shape letters: B streams, T steps, M model width, V vocabulary.
"""

import importlib
from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..block.recurrent_state import RecurrentState
from ..block.training_kernels import kernel_module
from ..contexts.ngram_embedding import dense_bytes
from .module_watch import check_weights

logger = logging.get_logger(__name__)

# With more streams, torch's matrix products on blocks of weights are faster.
_MOST_STREAMS = 256
# Larger weights are read faster by several threads, and the kernel is one.
_MOST_SHARED_BYTES = 1 << 26
# Steps of plain `forward` after weights were changed, before the program is written again.
_STEPS_BEFORE = 2
WEIGHT_TYPES = ("bfloat16", "int8")
_SHAPE = attrgetter("shape")
_TENSORS = {Tensor, nn.Parameter}


def _kernel() -> ModuleType | None:
    return kernel_module("step_cpu")


def kernel_for(dtype: torch.dtype) -> ModuleType | None:
    """The kernel if it was built and computes in this type."""
    kernel = _kernel()
    return kernel if kernel is not None and kernel.is_supported(dtype) else None


class CompiledStep:
    """The step of one model as a program of the kernel, which any number of threads may run at once.

    A backbone's program reads embedded inputs (B, 1, M) and gives the output after the final norm; a language model's
    reads token ids (B, 1) and gives logits. `weights` is the type in which it stores large weights; None for the
    model's.
    """

    def __init__(self, model: nn.Module, inputs: Tensor, weights: str | None = None):
        self.reads_tokens = not inputs.is_floating_point()
        backbone = model.model if self.reads_tokens else model
        self.dtype = backbone.embed_tokens.weight.dtype if self.reads_tokens else inputs.dtype
        self.config, self.weights = backbone.config, weights
        self.bytes_read = dense_bytes(model)
        layout = backbone.state_layout() if self.reads_tokens else backbone.layer_layout()
        self.shape_of_state = {name: torch.Size((1, *shape)) for name, shape in layout.items()}
        self._shapes: dict[int, list[tuple[int, ...]]] = {}  # B → shapes of the parts of a state
        self.problem: str | None = None
        self.waiting = 0
        self.program = None
        self._compile(model)

    @staticmethod
    def is_supported(model: nn.Module, inputs: Tensor) -> bool:
        """True where such a step can be compiled here."""
        if inputs.is_floating_point():
            return kernel_for(inputs.dtype) is not None
        embedding = getattr(model.model, "embed_tokens", None)
        return type(embedding) is nn.Embedding and kernel_for(embedding.weight.dtype) is not None

    @staticmethod
    def accepts(inputs: Tensor) -> bool:
        """True for numbers of streams of which the compiled step is the fastest."""
        return inputs.shape[0] <= _MOST_STREAMS

    @staticmethod
    def key(inputs: Tensor) -> torch.dtype:
        """Inputs with the same key share a program."""
        return inputs.dtype

    def run(self, model: nn.Module, inputs: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState] | None:
        """See [`run_single_step`]."""
        streams = inputs.shape[0]
        if not self._is_ready(model) or not self._matches(state, streams):
            return None
        new = self._try(model, lambda: self.program.run({**state, **self._named(inputs)}, streams))
        return None if new is None else (new.pop("output").unsqueeze(1), new)

    def run_chain(
        self, model: nn.Module, inputs: Tensor, state: RecurrentState
    ) -> tuple[Tensor, RecurrentState] | None:
        """T successive inputs of one stream, with the bits of single steps; most weights are read once for several.

        Inputs are ids (1, T), or embedded, (1, T, M). Returns the outputs (1, T, …) and the states before the first
        input and after each, (T + 1, …), or None where plain `forward` has to run.
        """
        if len(inputs) != 1 or not self._is_ready(model) or not self._matches(state, 1):
            return None
        found = self._try(model, lambda: self.program.run_chain(self._named(inputs[0]), state, inputs.shape[1]))
        return None if found is None else (found[0]["output"].unsqueeze(0), found[1])

    def _named(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"ids": inputs.long().contiguous()} if self.reads_tokens else {"hidden": inputs.contiguous()}

    def _try(self, model: nn.Module, run: Callable[[], Any]) -> Any:
        """The result of the program, or None where plain `forward` has to run."""
        kernel = _kernel()
        try:
            return run()
        except kernel.UnreadableTensor:  # plain `forward` reads it, or names it if it is no weight
            check_weights(model, torch.device("cpu"))
            return None
        except kernel.WeightsChanged:
            self.program, self.waiting = None, _STEPS_BEFORE
            return None

    def _is_ready(self, model: nn.Module) -> bool:
        if self.program is None and self.waiting:
            self.waiting -= 1
            if not self.waiting:
                self._compile(model)
        if self.program is None:
            return False
        return self.weights is not None or self.bytes_read <= _MOST_SHARED_BYTES or torch.get_num_threads() <= 2

    def _matches(self, state: RecurrentState, streams: int) -> bool:
        if type(state) is not dict or len(state) != len(self.shape_of_state):
            return False
        shapes = self._shapes.get(streams)
        if shapes is None:
            shapes = self._shapes[streams] = [(streams, *shape[1:]) for shape in self.shape_of_state.values()]
        try:
            parts = [*map(state.__getitem__, self.shape_of_state)]
        except KeyError:
            return False
        return {*map(type, parts)} <= _TENSORS and [*map(_SHAPE, parts)] == shapes

    def _compile(self, model: nn.Module) -> None:
        compiler = importlib.import_module("hf_recurrent.kernels.compiled_model")
        graph = importlib.import_module("hf_recurrent.kernels.step_graph")

        def of_backbone(hidden: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
            return model.read_block(hidden, state, None, None, slice(None), False)[:2]

        def of_language_model(ids: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
            hidden, state, _ = model.model.read_embedded(model.model.embed_inputs(ids, state), state)
            return model.lm_head(hidden), state

        forward = of_language_model if self.reads_tokens else of_backbone
        vocab_size = self.config.vocab_size if self.reads_tokens else None
        check_weights(model, torch.device("cpu"))
        try:
            # Tensors made in inference mode could not be used outside of it.
            with torch.inference_mode(False), torch.no_grad():
                self.program = compiler.compile_model_step(
                    forward, self.config.hidden_size, self.dtype, self.shape_of_state, vocab_size, self.weights
                )
        except graph.UnsupportedOp as error:
            self.problem = f"unsupported operator: {str(error).rstrip('.')}"
        except _kernel().UnreadableTensor as error:
            self.problem = f"it cannot read a weight: {str(error).rstrip('.')}"
        if self.problem is not None:
            backbone = type(model.model if self.reads_tokens else model).__name__
            logger.warning_once(
                f"Single steps of {backbone} run in plain `forward`, several times slower than in the compiled step: "
                f"{self.problem}."
            )
