"""Feeding tokens to a stock model through its own cache: `forward` of transformers, unchanged.

With blocks of one token, the default on a CPU, a text is read by the same steps as it is generated: so a state
depends on the tokens before it only, and not on what was cached or where a request ended. The results are those of
`generate()` after a prompt of one token, bit for bit; it reads longer prompts as one block, whose last bits differ.

Shape letters: B batch, T steps, V vocabulary.
"""

from collections.abc import Container, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.generation.text_state import TextState, pack_text_state, unpack_text_state
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, join_states, select_state, state_size
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.session import Snapshot
from hf_recurrent.stock_models.caches import POSITION, CachedModel

_CPU_SLICE, _GPU_BLOCK = 4, 64
_TYPICAL_TOKENS = 1000


class CachedSteps(ModelSteps):
    """A stock model of a server.

    Args:
        model: of transformers.
        block: tokens of a text that are read at once, where the stock code can; None for 1 on a CPU, and for 64
            elsewhere, where the last bits depend on the batch anyway.

    Raises:
        UnsupportedCache: the model is not recurrent, or its cache cannot be saved.
    """

    shortest_prefix = 4
    keeps_state_at_end = True
    learns_while_reading = False

    def __init__(self, model: PreTrainedModel, block: int | None = None):
        self.model, self.cached = model, CachedModel(model)
        self.zero = self.cached.zero
        self.is_batched = not self.cached.adapter.has_attention
        self._block = block or (1 if model.device.type == "cpu" else _GPU_BLOCK)
        # Few steps, each of which takes as long as one of the batch, which waits.
        self.slice_length = max(self._block, _CPU_SLICE)

    def about(self) -> dict[str, Any]:
        """Facts about the model's state for clients."""
        about = {"state_bytes_per_token": self.cached.bytes_per_token, "cache": self.cached.adapter.cache_name}
        return super().about() | about

    def notice(self, prefix_bytes):
        size, more = state_size(self.zero), self.cached.bytes_per_token
        first = "" if self.cached.continues_blocks else " at the beginning of a text, then as single tokens"
        reading = "single tokens" if self._block == 1 else f"blocks of {self._block}{first}"
        text = f"{type(self.model).__name__} with its {self.cached.adapter.cache_name}: a state has {size:,} bytes"
        text += f" and {more:,} for each token" if more else ""
        text += f" (--prefix_bytes holds {prefix_bytes // (size + _TYPICAL_TOKENS * more)}"
        text += f" of texts of {_TYPICAL_TOKENS:,} tokens)" if more else ")"
        rows = "as one batch" if self.is_batched else "one after another, a token each, because of their attention"
        return f"{text}. Texts are read as {reading} and generate {rows}."

    def pack(self, snapshot: Snapshot) -> bytes:
        """The content of a state file, which this server reads, and `generate --state` does not."""
        return pack_text_state(self.model, TextState(snapshot.state, [snapshot.pending]), self.cached.check_state)

    def unpack(self, data: bytes, known_weights: Container[str] = ()) -> Snapshot:
        """The inverse of [`pack`]; raises a ValueError as [`ModelSteps.unpack`]."""
        return self._snapshot(unpack_text_state(self.model, data, "body", known_weights, self.cached.check_state))

    def read(
        self, tokens: Sequence[int], state: RecurrentState, is_sampled: bool = False
    ) -> tuple[torch.Tensor, RecurrentState]:
        """Feed T tokens of one text, as [`ModelSteps.read`]."""
        logits, begin = [], 0
        while begin < len(tokens):
            can_read_block = self.cached.continues_blocks or int(state[POSITION]) == 0
            size = self._block if can_read_block else 1
            piece = torch.tensor([tokens[begin : begin + size]], device=self.model.device)
            found, state = self.cached.forward(piece, state)
            logits.append(found[0])
            begin += size
        return torch.cat(logits).cpu(), state

    def step(
        self, tokens: Sequence[int], state: RecurrentState, are_sampled: Sequence[bool]
    ) -> tuple[torch.Tensor, RecurrentState]:
        """Feed the next token of each of B texts, as [`ModelSteps.step`]."""
        positions = state[POSITION]
        if len(tokens) > 1 and int(positions.amin()) == 0:  # an empty text has another path in the stock code
            rows = [self.step([token], select_state(state, row), [True]) for row, token in enumerate(tokens)]
            return torch.cat([logits for logits, _ in rows]), join_states([new for _, new in rows])
        logits, new = self.cached.forward(torch.tensor(tokens, device=self.model.device).unsqueeze(1), state)
        return logits[:, -1].cpu(), new
