"""One byte of one stream by a model that learns, as a program of the kernel that it learns in.

The compiled step of a model holds copies of its weights in another order, to be made again after every update. This
program reads them where they are.

Shape letters: V vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from hf_recurrent.learning_rules.compiled_program import CompiledProgram, Uncompilable, block_cpu
from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.modeling.contexts.counted_predictions import init_network_state

if TYPE_CHECKING:
    from hf_recurrent.kernels.block_trace import BlockTrace
    from hf_recurrent.kernels.step_graph import Value

_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-8}


class CompiledReading(CompiledProgram):
    """Reads one byte after another; an [`Uncompilable`] says why the kernel cannot compute the step of this model."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        with self._recording():
            self._record()
            self._compare()

    def read(self, token: int, state: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """Read one byte; return logits (V,) and the state after it."""
        inputs = {"ids": torch.tensor([token], dtype=self.dtype)}
        inputs |= {f"state {name}": tensor for name, tensor in state.items()}
        logits = torch.empty(self.model.config.vocab_size, dtype=self.dtype)
        new_state = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self.program.run(inputs, {"logits": logits} | {f"state {name}": part for name, part in new_state.items()})
        return logits, new_state

    def buffered(self) -> "BufferedReading":
        """A stream that this program reads in memory of its own."""
        return BufferedReading(self)

    def _record(self) -> None:
        trace, values = self.record()
        self.program = block_cpu.BlockProgram(trace.graph, values, trace.guards, trace.effects)

    def record(self) -> tuple["BlockTrace", dict[str, "Value"]]:
        """The recorded step: inputs `ids` and `state NAME`; results `logits` and `state NAME`.

        Raises:
            UnsupportedOp: the model has an operator without a rule.
        """
        from hf_recurrent.kernels.block_trace import BlockTrace

        ids, state = torch.zeros(1, 1, dtype=torch.long), init_network_state(self.model, 1)
        inputs = {"ids": ids} | {f"state {name}": tensor for name, tensor in state.items()}
        with BlockTrace(self.dtype, inputs, self.parameters) as trace:
            with torch.enable_grad():  # without gradients, the compiled step would run
                output = self._forward(ids, state=state, use_cache=True)
            results = {"logits": output.logits} | {f"state {name}": part for name, part in output.state.items()}
        return trace, {name: trace.value_of(tensor) for name, tensor in results.items()}

    def _compare(self) -> None:
        """Raise unless the program gives what the model gives."""
        state = plain_state = init_network_state(self.model, 1)
        for token in range(2):
            logits, state = self.read(token, state)
            with torch.enable_grad():
                output = self.model(torch.tensor([[token]]), state=plain_state, use_cache=True)
            plain_state = output.state
            pairs = [(logits, output.logits[0, 0]), *((state[name], part) for name, part in plain_state.items())]
            for found, wanted in pairs:
                bound = _TOLERANCES[self.dtype] * wanted.detach().abs().amax().clamp_min(1e-6)
                if not bool(((found - wanted).abs() <= bound).all()):
                    raise Uncompilable("the program computes another step")


class BufferedReading:
    """One stream in memory of its own: a byte costs little more than the kernel's time.

    Attributes:
        logits: (1, V), of the byte after the last one; written by every call of `read`.
    """

    def __init__(self, reading: CompiledReading):
        self._program = reading.program
        self._token = torch.zeros(1, dtype=reading.dtype)
        self.logits = torch.zeros(1, reading.model.config.vocab_size, dtype=reading.dtype)
        zero = init_network_state(reading.model, 1)
        # A call reads the one state and writes the other.
        self._states = [{name: tensor.clone() for name, tensor in zero.items()} for _ in range(2)]
        self._calls = [self._call(*pair) for pair in (self._states, self._states[::-1])]
        self._token_value = self._token.numpy()
        self._now = 0

    def _call(self, before: RecurrentState, after: RecurrentState):
        inputs = {"ids": self._token} | {f"state {name}": tensor for name, tensor in before.items()}
        outputs = {"logits": self.logits} | {f"state {name}": tensor for name, tensor in after.items()}
        return self._program.bound_call(inputs, outputs)

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
