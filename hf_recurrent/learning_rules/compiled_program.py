"""Programs of a compiled kernel that are recorded from a model, and when they may run instead of the model.

Shape letters: V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_recurrent.learning_rules.traced_unit import shadowed
from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.modeling.contexts.counted_predictions import init_network_state
from hf_recurrent.modeling.contexts.ngram_embedding import dense_bytes
from hf_recurrent.modeling.step.module_watch import ModuleWatch

try:
    from hf_recurrent.kernels import block_cpu
except ImportError:
    block_cpu = None

if TYPE_CHECKING:
    from hf_recurrent.kernels.block_trace import BlockTrace
    from hf_recurrent.kernels.step_graph import Value

_MODULE_HOOKS = attrgetter("_backward_hooks", "_backward_pre_hooks")
_ROOT_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks")
_PARAMETER_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
# Larger weights are read faster by several threads, and the kernel is one.
_MOST_SHARED_BYTES = 1 << 26
# Largest relative difference between the step of a program and the model's.
_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-8}


class Uncompilable(Exception):
    """The kernel cannot compute what a program is asked for; the text says why."""


def named(part: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Inputs or results of a program: `NAME` becomes `part NAME`."""
    return {f"{part} {name}": tensor for name, tensor in tensors.items()}


class CompiledProgram:
    """A program for a model as it is now; it reads the weights where they are, so they may change in place.

    Call [`is_current`] and [`is_observed`] before it runs. An [`Uncompilable`] says why there is none for this model.
    """

    def __init__(self, model: PreTrainedModel):
        if block_cpu is None:
            raise Uncompilable("the kernel was not built when hf-recurrent was installed")
        self.model, self.dtype = model, model.dtype
        self.parameters = dict(model.named_parameters())
        if not block_cpu.is_supported(self.dtype) or model.device.type != "cpu":
            raise Uncompilable(f"the model is {str(self.dtype).removeprefix('torch.')} on {model.device}")
        self.bytes_read = dense_bytes(model)
        self.watch = ModuleWatch(model)
        self.trained = self._trained()
        self.modules = list(model.modules())
        if self.watch.overridden:
            raise Uncompilable("the model has hooks, replaced methods or tensors of other kinds")

    def is_current(self) -> bool:
        """True if the model is as it was when the program was recorded; weights may have other values."""
        return self.watch.unchanged() and self._trained() == self.trained

    def is_observed(self) -> bool:
        """True while hooks or modes observe the operations, or several threads are faster."""
        return bool(
            any(_ROOT_HOOKS(self.model))
            or any(map(any, map(_MODULE_HOOKS, self.modules)))
            or any(map(any, map(_PARAMETER_HOOKS, self.parameters.values())))
            or torch.is_autocast_enabled("cpu")
            or torch._C._len_torch_dispatch_stack()
            or (torch.get_num_threads() > 2 and self.bytes_read > _MOST_SHARED_BYTES)
        )

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters.values()]

    def _forward(self, ids: torch.Tensor, **arguments: Any) -> ModelOutput:
        """The model's output for recorded ids, whose values nothing may look at."""
        backbone = getattr(self.model, "model", None)
        if getattr(backbone, "embed_ngrams", None) is None:
            return self.model(inputs_embeds=self.model.get_input_embeddings()(ids), **arguments)
        embed = backbone.embed_inputs
        with shadowed(backbone, embed_inputs=lambda _, *others: embed(ids, *others)):
            return self.model(torch.zeros(ids.shape, dtype=torch.long), **arguments)

    @staticmethod
    @contextmanager
    def _recording() -> Iterator[None]:
        """Context in which the program is recorded: what the kernel cannot do becomes [`Uncompilable`]."""
        try:
            with torch.inference_mode(False):
                yield
        except block_cpu.UnsupportedOp as error:
            raise Uncompilable(f"unsupported operator: {str(error).rstrip('.')}") from error
        except block_cpu.UnreadableTensor as error:
            raise Uncompilable(f"the kernel cannot read a weight: {str(error).rstrip('.')}") from error


class CompiledReading(CompiledProgram):
    """Reads one stream byte by byte with a model that learns; an [`Uncompilable`] says why the kernel cannot.

    The compiled step of a model holds copies of its weights in another order, to be made again after every update.
    This program reads them where they are.

    Attributes:
        logits: (1, V), of the byte after the last one; written by every call of `read`.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        zero = init_network_state(model, 1)
        with self._recording():
            trace, values = self.record()
            program = block_cpu.BlockProgram(trace.graph, values, trace.guards, trace.effects)
            self._token = torch.zeros(1, dtype=self.dtype)
            self._token_value = self._token.numpy()
            self.logits = torch.zeros(1, model.config.vocab_size, dtype=self.dtype)
            # A call reads the one state and writes the other.
            self._states = [{name: tensor.clone() for name, tensor in zero.items()} for _ in range(2)]
            self._calls = [
                program.bound_call(
                    {"ids": self._token} | named("state", before), {"logits": self.logits} | named("state", after)
                )
                for before, after in (self._states, self._states[::-1])
            ]
            self._program, self._now = program, 0
            self._compare(zero)
        self.state = zero

    def read(self, token: int) -> None:
        """Read one byte."""
        self._token_value[0] = token
        if self._calls[self._now].run():
            raise RuntimeError("The program of a step and its model have parted.")
        self._now = 1 - self._now

    @property
    def state(self) -> RecurrentState:
        """A copy of the state after all bytes."""
        return {name: tensor.clone() for name, tensor in self._states[self._now].items()}

    @state.setter
    def state(self, state: RecurrentState) -> None:
        for name, tensor in self._states[self._now].items():
            tensor.copy_(state[name])

    def record(self) -> tuple["BlockTrace", dict[str, "Value"]]:
        """The recorded step: inputs `ids` and `state NAME`; results `logits` and `state NAME`.

        Raises:
            UnsupportedOp: the model has an operator without a rule.
        """
        from hf_recurrent.kernels.block_trace import BlockTrace

        ids, state = torch.zeros(1, 1, dtype=torch.long), init_network_state(self.model, 1)
        with BlockTrace(self.dtype, {"ids": ids} | named("state", state), self.parameters) as trace:
            with torch.enable_grad():  # without gradients, the compiled step would run
                output = self._forward(ids, state=state, use_cache=True)
            results = {"logits": output.logits} | named("state", output.state)
        return trace, {name: trace.value_of(tensor) for name, tensor in results.items()}

    def _compare(self, state: RecurrentState) -> None:
        """Raise unless the program gives what the model gives."""
        for token in range(2):
            self.read(token)
            with torch.enable_grad():
                output = self.model(torch.tensor([[token]]), state=state, use_cache=True)
            state, found_state = output.state, self.state
            pairs = [(self.logits[0], output.logits[0, 0]), *((found_state[name], state[name]) for name in state)]
            for found, wanted in pairs:
                bound = _TOLERANCES[self.dtype] * wanted.detach().abs().amax().clamp_min(1e-6)
                if not bool(((found - wanted).abs() <= bound).all()):
                    raise Uncompilable("the program computes another step")
