"""Speculative decoding: a draft proposes several bytes, and the model checks all of them in one forward pass.

Shape letters: T steps, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_recurrent.generation.arguments import (
    NEW_TEXT,
    NewText,
    check_positive,
    check_prompt,
    end_tokens,
    given_state,
)
from hf_recurrent.generation.constraints import Constraint
from hf_recurrent.generation.drafts import Draft, ModelDraft, PromptLookup
from hf_recurrent.generation.state_reader import Reading, StateReader
from hf_recurrent.generation.token_choice import Greedy, Sampling, TokenChoice
from hf_recurrent.modeling.block.recurrent_state import RecurrentState

# Without a state after every byte, accepted bytes are read again until a whole draft is accepted, or until here.
_MOST_UNREAD = 32


@dataclass
class SpeculativeOutput:
    """Result of [`generate_speculative`].

    Args:
        sequences: (1, T + new), prompt and new bytes, including the end byte.
        state: of the model after all of `sequences`, as after `generate()`.
        draft_state: the same of the draft; None for a draft without a model.
        pending_state: of the model before the last byte. To continue without new text, pass it with that byte.
        pending_draft_state: the same of the draft.
        proposed: number of bytes that the draft proposed.
        accepted: number of these that the model kept.
        forwards: forward passes of the model, including that of the prompt, until the last byte was chosen.
        draft_forwards: the same of the draft.
    """

    sequences: torch.Tensor
    state: RecurrentState
    draft_state: RecurrentState | None
    pending_state: RecurrentState
    pending_draft_state: RecurrentState | None
    proposed: int
    accepted: int
    forwards: int
    draft_forwards: int

    @property
    def acceptance_rate(self) -> float:
        """Accepted bytes / proposed bytes; NaN if there was no proposal."""
        return self.accepted / self.proposed if self.proposed else math.nan


@torch.no_grad()
def generate_speculative(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    draft: PreTrainedModel | str,
    max_new_tokens: int = 200,
    draft_tokens: int = 3,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    state: RecurrentState | NewText = NEW_TEXT,
    draft_state: RecurrentState | NewText = NEW_TEXT,
    eos_token_id: int | Sequence[int] | str | None = "model",
    constraint: Constraint | None = None,
    generator: torch.Generator | None = None,
    streamer: BaseStreamer | None = None,
) -> SpeculativeOutput:
    """Generate as `model` alone would, in fewer of its forward passes.

    In each round the draft proposes a few bytes, and the model reads them in one forward pass. Greedy, it keeps those
    that it would have chosen. Sampling, it keeps each with the probability at which its own distribution results
    (Leviathan et al. 2023, Chen et al. 2023). One more byte is its own in either case.

    On a CPU, Memora and Hawk read a draft with the numbers of single bytes, bit for bit, so that the greedy text is
    that of `generate()`. Other models and devices read it with `forward`, whose logits may differ in the last bits:
    there, the text may differ where the two best bytes are that close.

    Args:
        model: a recurrent language model.
        input_ids: (1, T), the prompt, T ≥ 1.
        draft: a recurrent language model with the same vocabulary, or "prompt-lookup", which proposes what followed
            the last occurrence of the latest bytes.
        max_new_tokens: number of new bytes, at least 1.
        draft_tokens: bytes per round. On a CPU, 3 is best for most: four bytes share one reading of the weights.
        do_sample: sample; greedy by default. The next four arguments are for sampling.
        temperature: divides the logits of both models.
        top_k: sample from the k most likely bytes; 0 for all.
        top_p: sample from the most likely bytes of this probability; 1 for all.
        generator: random numbers, on the CPU.
        state: of the model, of the text before the prompt; by default, there is none.
        draft_state: the same of the draft.
        eos_token_id: the end byte or bytes; those of the model's generation configuration by default; None for none.
        constraint: what the new bytes have to match.
        streamer: receives the prompt and each new byte.

    Raises:
        TypeError: a model has no recurrent state.
        ValueError: there is more than one row, the vocabularies differ, a state is None, or an argument is out of
            range.
    """
    check_prompt(input_ids)
    check_positive("max_new_tokens", max_new_tokens)
    check_positive("draft_tokens", draft_tokens)
    state, draft_state = given_state("state", state), given_state("draft_state", draft_state)
    choice = Sampling(temperature, top_k, top_p, generator) if do_sample else Greedy()
    ends = end_tokens(model, eos_token_id, constraint)
    reader = StateReader(model)
    rounds = _Rounds(reader, _build_draft(model, draft, draft_state, choice), choice, constraint, draft_tokens)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    tokens = input_ids[0].tolist()
    last = len(tokens) + max_new_tokens
    new = rounds.begin(input_ids, state)
    while True:
        new = _until_end(new, ends)
        rounds.accept(new)
        tokens += new
        if streamer is not None:
            for token in new:
                streamer.put(torch.tensor([token]))
        if len(tokens) == last or new[-1] in ends:
            break
        new = rounds.propose_and_verify(last - len(tokens))
    if streamer is not None:
        streamer.end()
    drafting, forwards = rounds.draft, (reader.forwards, rounds.draft.forwards)
    pending, pending_draft = rounds.state(), drafting.state()
    return SpeculativeOutput(
        sequences=torch.tensor([tokens], device=input_ids.device),
        state=reader.read(tokens[-1:], pending).states[1],
        draft_state=drafting.final_state(),
        pending_state=pending,
        pending_draft_state=pending_draft,
        proposed=rounds.proposed,
        accepted=rounds.accepted,
        forwards=forwards[0],
        draft_forwards=forwards[1],
    )


def _build_draft(
    model: PreTrainedModel, draft: PreTrainedModel | str, state: RecurrentState | None, choice: TokenChoice
) -> Draft:
    if isinstance(draft, str):
        if draft != "prompt-lookup":
            raise ValueError(f"`draft` is {draft!r}; it must be a model or 'prompt-lookup'.")
        if state is not None:
            raise ValueError("`draft_state` is given, but 'prompt-lookup' has no state.")
        return PromptLookup()
    reader = StateReader(draft, "draft")
    if (theirs := draft.config.vocab_size) != (ours := model.config.vocab_size):
        raise ValueError(f"`draft` has a vocabulary of {theirs}; it must be that of the model, {ours}.")
    return ModelDraft(reader, state, choice)


def _until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    found = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: found + 1]


class _Rounds:
    """The text so far: for model and draft, a state and the tokens that it has not read."""

    def __init__(
        self, reader: StateReader, draft: Draft, choice: TokenChoice, constraint: Constraint | None, draft_tokens: int
    ):
        self.reader, self.draft, self.choice, self.draft_tokens = reader, draft, choice, draft_tokens
        self.proposed = self.accepted = 0
        self._position = None if constraint is None else constraint.begin()
        self._unread: list[int] = []
        self._block: list[int] = []  # the tokens of the last reading: the unread ones, then the draft
        self._reading: Reading

    def begin(self, prompt: torch.Tensor, state: RecurrentState | None) -> list[int]:
        """Read the prompt (1, T) with both models; the first new token."""
        logits, state = self.reader.read_prompt(prompt, state)
        self._reading = Reading(logits.unsqueeze(0), {0: state})
        self.draft.begin(prompt)
        return [self.choice.propose(self._restrict(logits, []))[0]]

    def propose_and_verify(self, most: int) -> list[int]:
        """The next tokens, at least one and at most `most`."""
        tokens, distributions = self.draft.propose(min(self.draft_tokens, most - 1), self._restrict)
        state = self.state() if len(self._unread) > _MOST_UNREAD else self._state
        self._block = self._unread + tokens
        self._reading = self.reader.read(self._block, state)
        rows = self._reading.logits[len(self._unread) - 1 :]
        logits = rows.float().cpu()
        if self._position is not None:
            logits = torch.stack([self._restrict(row, tokens[:place]) for place, row in enumerate(logits)])
        new = self.choice.verify(logits, tokens, distributions)
        self.proposed += len(tokens)
        self.accepted += len(new) - 1
        return new

    def accept(self, new: list[int]) -> None:
        """Continue after these tokens, all but the last of which were proposed."""
        certain = len(self._unread) + len(new) - 1
        read, self._state = self._reading.latest_state(certain)
        self._unread = [*self._block[read:certain], new[-1]]
        self.draft.accept(new)
        for token in new:
            self._position = self._position and self._position.after(token)

    def state(self) -> RecurrentState:
        """The state of the model after all tokens but the last."""
        if len(self._unread) > 1:
            self._state = self.reader.read(self._unread[:-1], self._state).states[len(self._unread) - 1]
            self._unread = self._unread[-1:]
        return self._state

    def _restrict(self, logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Logits (V,) for the choice after `tokens` that are not accepted yet, float32 as in `generate()`."""
        position = self._position
        for token in tokens:
            position = position and position.after(token)
        logits = logits.float().cpu()
        return logits if position is None else logits.masked_fill(~position.allowed(), -math.inf)
