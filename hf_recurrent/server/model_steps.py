"""Feeding tokens to a model: a slice of one text, or one token of each of many texts.

[`ModelSteps`] is all that a server knows about a model; `cached_steps.py` has the one for models of transformers.

A token has the same result in a slice of any length and in a batch of any size, bit for bit, where the model has a
compiled step. Elsewhere (on a GPU, in bfloat16, while the model learns) the last bits depend on both.

A count memory does not learn from tokens that the model itself has chosen, as in `generate()`: it would repeat itself.

Shape letters: B batch, T steps, V vocabulary.
"""

import hashlib
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.fingerprints import weights_fingerprint
from hf_recurrent.checkpoints.weight_hashing import weights_hash
from hf_recurrent.generation.state_reader import StateReader
from hf_recurrent.generation.text_state import TextState, pack_text_state, unpack_text_state
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, check_state, state_dtype, state_size
from hf_recurrent.modeling.contexts.count_memory import STATE_PART
from hf_recurrent.modeling.contexts.counted_predictions import take_counts
from hf_recurrent.modeling.step.single_step import plain_forward, run_single_step
from hf_recurrent.server.adapters import ADAPTER, ReadoutAdapter, take_adapter
from hf_recurrent.server.session import Snapshot
from hf_recurrent.stock_models.with_state import with_state

# Long enough to read most weights once for several bytes; short, because the other texts wait meanwhile.
_SLICE = 48


class ModelSteps:
    """The model of a server. One thread uses it, without gradients.

    Args:
        model: a recurrent language model.
        learns: its weights change; a step compiled from them would be recompiled each time.
        adapter_rank: of adapters of texts that learn; 0 for none.
    """

    adapter: ReadoutAdapter | None = None  # of texts that learn
    slice_length = _SLICE  # tokens that are read between two steps of the batch
    shortest_prefix = 32  # tokens of the shortest text whose state is worth keeping
    is_batched = True  # a step takes several texts
    keeps_state_at_end = False  # an end token ends an answer, not the text

    def __init__(self, model: PreTrainedModel, learns: bool = False, adapter_rank: int = 0):
        self.model, self._learns = with_state(model), learns
        # Of a new text. A part without elements grows along its dimension of size 0.
        self.zero: RecurrentState = self.model.init_state(1)
        self._device, self._memory = model.device, getattr(self.model, "count_memory", None)
        with self._forward():
            self._reader = StateReader(self.model, longest_chain=_SLICE)
        if adapter_rank:
            self.adapter = ReadoutAdapter(self.model, adapter_rank)

    @property
    def keeps_answers(self) -> bool:
        """True if tokens that the model itself has chosen give the same state as reading them."""
        return self._memory is None

    def reusable(self, length: int) -> int:
        """Length of the longest beginning of a text whose state does not depend on where reading stopped."""
        return length

    @property
    def vocab_size(self) -> int:
        """Ids that a text may have."""
        return self.model.config.get_text_config().vocab_size

    def about(self) -> dict[str, Any]:
        """Facts about the model's state for clients."""
        about = {"state_bytes": state_size(self.zero), "batched": self.is_batched}
        return about if self.adapter is None else about | {"adapter_bytes": 4 * self.adapter.size}

    def notice(self, prefix_bytes: int) -> str | None:
        """A message for the start of a server whose prefix store has this many bytes, or None."""
        return None

    def pack(self, snapshot: Snapshot) -> bytes:
        """The content of a state file; raises a ValueError if the state has NaN or infinite values."""
        rest, vector = take_adapter(snapshot.state)
        state = rest if vector is None else snapshot.state
        return pack_text_state(self.model, TextState(state, [snapshot.pending]), self._check)

    def unpack(self, data: bytes, known_weights: Container[str] = ()) -> Snapshot:
        """The inverse of [`pack`]; raises a ValueError for damaged content, several texts, or unknown weights."""
        text = unpack_text_state(self.model, data, known_weights, self._check)
        if len(text.pending) != 1:
            raise ValueError(f"The body has the states of {len(text.pending)} texts; it must have one.")
        rest, vector = take_adapter(text.state)
        state = {name: part.to(self.zero[name]) for name, part in rest.items()}
        return Snapshot(state | ({} if vector is None else {ADAPTER: vector.cpu()}), text.pending[0])

    def _check(self, state: RecurrentState) -> None:
        """Raise a ValueError unless a state is of this model, with or without an adapter."""
        rest, vector = (state, None) if self.adapter is None else take_adapter(state)
        streams = max(len(next(iter(rest.values()), ())), 1)
        shapes = {name: part.shape for name, part in self.model.init_state(streams, "meta").items()}
        check_state(rest, shapes, integer_parts=self.model.integer_state_parts)
        if vector is not None:
            self.adapter.check(vector)

    def computation(self) -> str:
        """Names the weights and the arithmetic: states of equal computations are equal bit for bit.

        The arithmetic depends on the number type, the processor and the versions of libraries, so it is tried.
        """
        digest = hashlib.sha256(f"{weights_hash(self.model)} {weights_fingerprint(self.model)}".encode())
        vocab_size, state, size = self.vocab_size, self.zero, self.slice_length
        with torch.no_grad():
            for begin in (0, size):
                logits, state = self.read([token % vocab_size for token in range(begin, begin + size)], state)
                after, state = self.step([begin % vocab_size], state, [False])
                for part in (logits, after, *state.values()):
                    digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def read(
        self,
        tokens: Sequence[int],
        state: RecurrentState,
        is_sampled: bool = False,
        targets: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, RecurrentState]:
        """Feed T tokens of one text; returns the logits (T, V) after each, on the CPU, and the state.

        The text's adapter learns from `targets`, the T tokens that follow. `is_sampled` tokens are the model's own.
        """
        rest, vector = take_adapter(state)
        is_adapted = vector is not None or targets is not None
        if is_adapted and vector is None:
            vector = self.adapter.new()

        def change(logits: torch.Tensor) -> torch.Tensor:
            nonlocal vector
            if targets is None:
                return self.adapter.change(logits, vector)
            changed, vector = self.adapter.learn(logits, vector, targets)
            return changed

        with self._forward():
            reading = self._reader.read(tokens, rest, is_sampled, change if is_adapted else None)
        # The states of a chain are one piece of memory; the counts' state is another.
        last = reading.states[len(tokens)].items()
        new = {name: part if name == STATE_PART else part.clone() for name, part in last}
        return reading.logits.cpu(), new | {ADAPTER: vector} if is_adapted else new

    def step(
        self,
        tokens: Sequence[int],
        state: RecurrentState,
        are_sampled: Sequence[bool],
        adapters: Sequence[torch.Tensor | None] = (),
    ) -> tuple[torch.Tensor, RecurrentState]:
        """Feed the next token of each of B texts; returns the logits (B, V), on the CPU, and the state.

        `are_sampled` says of each token whether it is the model's own; `state` is without `adapters`.
        """
        rest, counts = take_counts(state, self._memory)
        input_ids = torch.tensor(tokens, device=self._device).unsqueeze(1)
        with self._forward():
            found = self._reader.step(input_ids, rest) or run_single_step(self.model, input_ids, rest)
            if found is None:
                output = self.model(input_ids=input_ids, state=rest, use_cache=True)
                found = output.logits, output.state
        logits, new = found
        for row, vector in enumerate(adapters):  # one by one, so that the bits do not depend on the batch
            if vector is not None:
                logits[row] = self.adapter.change(logits[row], vector)
        if counts is not None:
            logits, counts = self._mix_rows(input_ids, counts, logits, are_sampled)
            new = new | {STATE_PART: counts}
        return logits[:, -1].cpu(), new

    def continue_from(self, snapshot: Snapshot, tokens: Sequence[int], begin_token: int | None = None) -> Snapshot:
        """The place after tokens that were generated at a snapshot; `begin_token` is read first in an empty text."""
        state, pending = snapshot.state, begin_token if snapshot.pending is None else snapshot.pending
        with torch.no_grad():
            if pending is not None:
                _, state = self.read([pending], state, snapshot.is_generating)
            for begin in range(0, len(tokens) - 1, self.slice_length):
                piece = tokens[begin : min(begin + self.slice_length, len(tokens) - 1)]
                _, state = self.read(piece, state, is_sampled=True)
        return Snapshot(state, tokens[-1], snapshot.bytes_read + len(tokens))

    def _mix_rows(
        self, input_ids: torch.Tensor, counts: torch.Tensor, logits: torch.Tensor, are_sampled: Sequence[bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probabilities (B, 1, V) of the model, given the network's logits, and the state of its counts."""
        mix = self.model.mix_counts
        if len(kinds := {*are_sampled}) == 1:
            return mix(input_ids, counts, logits, slice(None), sampled=are_sampled[0])
        mixed, new = logits.to(state_dtype(logits.dtype), copy=True), counts.clone()
        for kind in kinds:
            rows = [row for row, is_sampled in enumerate(are_sampled) if is_sampled == kind]
            mixed[rows], new[rows] = mix(input_ids[rows], counts[rows], logits[rows], slice(None), sampled=kind)
        return mixed, new

    def _forward(self) -> AbstractContextManager:
        return plain_forward() if self._learns else nullcontext()
