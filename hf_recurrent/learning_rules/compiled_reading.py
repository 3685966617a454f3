"""One byte of one stream by a model that learns, as a program of the kernel that it learns in.

The compiled step of a model holds copies of its weights in another order, to be made again after every update. This
program reads them where they are.

Shape letters: V vocabulary.
"""

import torch
from transformers import PreTrainedModel

from hf_recurrent.learning_rules.compiled_program import CompiledProgram, Uncompilable, block_cpu
from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.modeling.contexts.counted_predictions import init_network_state

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

    def _record(self) -> None:
        from hf_recurrent.kernels.block_trace import BlockTrace

        ids, state = torch.zeros(1, 1, dtype=torch.long), init_network_state(self.model, 1)
        inputs = {"ids": ids} | {f"state {name}": tensor for name, tensor in state.items()}
        with BlockTrace(self.dtype, inputs, self.parameters) as trace:
            with torch.enable_grad():  # without gradients, the compiled step would run
                output = self._forward(ids, state=state, use_cache=True)
            results = {"logits": output.logits} | {f"state {name}": part for name, part in output.state.items()}
        values = {name: trace.value_of(tensor) for name, tensor in results.items()}
        self.program = block_cpu.BlockProgram(trace.graph, values, trace.guards, trace.effects)

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
