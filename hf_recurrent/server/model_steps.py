"""Feeding tokens to a model: a slice of one text, or one token of each of many texts.

A token has the same result in a slice of any length and in a batch of any size, bit for bit, where the model has a
compiled step. Elsewhere (on a GPU, in bfloat16, while the model learns) the last bits depend on both.

Shape letters: B batch, T steps, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from hf_recurrent.generation.state_reader import StateReader
from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.modeling.step.single_step import plain_forward, run_single_step
from hf_recurrent.server.session import Snapshot
from hf_recurrent.stock_models.with_state import with_state

# Long enough to read most weights once for several bytes; short, because the other texts wait meanwhile.
_SLICE = 48


class ModelSteps:
    """The model of a server. One thread uses it, without gradients.

    Args:
        model: a recurrent language model.
        learns: its weights change; a step compiled from them would have to be compiled again each time.

    Raises:
        TypeError: the model has no recurrent state.
    """

    slice_length = _SLICE

    def __init__(self, model: PreTrainedModel, learns: bool = False):
        self.model, self._learns = with_state(model), learns
        self._device = model.device
        with self._forward():
            self._reader = StateReader(self.model, longest_chain=_SLICE)

    def read(self, tokens: Sequence[int], state: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """Feed T tokens of one text; returns the logits (T, V) after each, on the CPU, and the state."""
        with self._forward():
            reading = self._reader.read(tokens, state)
        # The states of a chain are one piece of memory.
        return reading.logits.cpu(), {name: part.clone() for name, part in reading.states[len(tokens)].items()}

    def step(self, tokens: Sequence[int], state: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """Feed the next token of each of B texts; returns the logits (B, V), on the CPU, and the state."""
        input_ids = torch.tensor(tokens, device=self._device).unsqueeze(1)
        with self._forward():
            found = run_single_step(self.model, input_ids, state)
            if found is None:
                output = self.model(input_ids=input_ids, state=state, use_cache=True)
                found = output.logits, output.state
        logits, state = found
        return logits[:, -1].cpu(), state

    def continue_from(self, snapshot: Snapshot, tokens: Sequence[int]) -> Snapshot:
        """The place after more tokens, without their logits."""
        state = snapshot.state
        feed = [*([] if snapshot.pending is None else [snapshot.pending]), *tokens[:-1]]
        with torch.no_grad():
            for begin in range(0, len(feed), _SLICE):
                _, state = self.read(feed[begin : begin + _SLICE], state)
        return Snapshot(state, tokens[-1], snapshot.bytes_read + len(tokens))

    def _forward(self) -> AbstractContextManager:
        return plain_forward() if self._learns else nullcontext()
