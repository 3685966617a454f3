"""Speculative decoding: a draft proposes several bytes, and the model checks all of them in one forward pass.

Shape letters: T steps, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_recurrent.argument_checks import check_sampling
from hf_recurrent.generation.arguments import NEW_TEXT, NewText, check_prompt, end_tokens, given_state
from hf_recurrent.generation.constraints import Constraint, ConstraintPosition
from hf_recurrent.generation.drafts import GreedyChoice, ModelDraft, PromptLookup, SampledChoice
from hf_recurrent.generation.sampling import Sampling
from hf_recurrent.generation.state_reader import StateReader, UnreadText
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
        forwards: forward passes of the model, the prompt included, until the last byte was chosen.
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

    In each round the draft proposes a few bytes, and the model reads them in one forward pass. Greedy, it keeps the
    bytes that it would have chosen; sampling, it accepts each with a probability that leaves its own distribution
    unchanged (Leviathan et al. 2023, Chen et al. 2023). In either case it adds one byte. Greedy text equals
    `generate()`, up to the last bits of logits where the compiled step does not read drafts ([`StateReader`]).

    Args:
        model: a recurrent language model.
        input_ids: (1, T), the prompt, T ≥ 1.
        draft: a recurrent language model with the same vocabulary, or "prompt-lookup": the bytes that followed the
            last occurrence of the latest bytes.
        max_new_tokens: number of new bytes, at least 1.
        draft_tokens: bytes per round. On a CPU, 3 is best for most: four bytes share one reading of the weights.
        do_sample: sample with `temperature`, `top_k`, `top_p` and `generator`; greedy by default.
        state, draft_state: of model and draft, of the text before the prompt; by default, there is none.
        eos_token_id: the end byte or bytes, by default from the model's generation configuration; None for none.
        constraint: a form that the new bytes have to match.
        generator: random numbers, on the CPU.
        streamer: receives the prompt and each new byte.

    Raises:
        TypeError: a model has no recurrent state.
        ValueError: there are several prompts, vocabularies differ, a state is None, or an argument is out of range.
    """
    check_prompt(input_ids, max_new_tokens=max_new_tokens, draft_tokens=draft_tokens)
    state, draft_state = given_state("state", state), given_state("draft_state", draft_state)
    choice = GreedyChoice()
    if do_sample:
        check_sampling(temperature, top_k, top_p, instead_of_zero="`do_sample=False`")
        choice = SampledChoice(Sampling(temperature, top_k, top_p), generator)
    ends = end_tokens(model, eos_token_id, constraint)
    reader, position = StateReader(model), constraint and constraint.begin()
    text = _DraftedText(reader, state, _build_draft(model, draft, draft_state, choice), choice, position)
    return text.generate(input_ids, max_new_tokens, draft_tokens, ends, streamer)


def _build_draft(
    model: PreTrainedModel, draft: PreTrainedModel | str, state: RecurrentState | None, choice: GreedyChoice
) -> ModelDraft | PromptLookup:
    if isinstance(draft, str):
        if draft != "prompt-lookup":
            raise ValueError(f"`draft` is {draft!r}; it must be a model or 'prompt-lookup'.")
        if state is not None:
            raise ValueError("`draft_state` is given, but 'prompt-lookup' has no state.")
        return PromptLookup()
    reader = StateReader(draft, "draft")
    if (theirs := draft.config.vocab_size) != (ours := model.config.vocab_size):
        raise ValueError(f"`draft` has a vocabulary of {theirs}; it must be as in the model, {ours}.")
    return ModelDraft(reader, state, choice)


@dataclass
class _DraftedText(UnreadText):
    """The text of the model, with a draft that proposes its next tokens."""

    draft: ModelDraft | PromptLookup
    choice: GreedyChoice
    position: ConstraintPosition | None
    proposed: int = 0
    accepted: int = 0

    def generate(
        self,
        prompt: torch.Tensor,
        max_new_tokens: int,
        draft_tokens: int,
        ends: frozenset[int],
        streamer: BaseStreamer | None,
    ) -> SpeculativeOutput:
        """Read the prompt (1, T) and continue it."""
        if streamer is not None:
            streamer.put(prompt.cpu())
        logits, self.state = self.reader.read_prompt(prompt, self.state)
        self.draft.begin(prompt)
        tokens = [self.choice.propose(self._restrict(logits, []))[0]]
        self._accept(tokens, [], {0: self.state})
        new = tokens
        while True:
            for token in new if streamer is not None else ():
                streamer.put(torch.tensor([token]))
            if len(tokens) == max_new_tokens or tokens[-1] in ends:
                break
            new = self._round(min(draft_tokens, max_new_tokens - len(tokens) - 1), ends)
            tokens = tokens + new
        if streamer is not None:
            streamer.end()
        forwards, draft_forwards = self.reader.forwards, self.draft.forwards
        pending, pending_draft = self.pending_state(), self.draft.pending_state()
        return SpeculativeOutput(
            sequences=torch.cat([prompt, torch.tensor([tokens], device=prompt.device)], 1),
            state=self.final_state(),
            draft_state=self.draft.final_state(),
            pending_state=pending,
            pending_draft_state=pending_draft,
            proposed=self.proposed,
            accepted=self.accepted,
            forwards=forwards,
            draft_forwards=draft_forwards,
        )

    def _round(self, count: int, ends: frozenset[int]) -> list[int]:
        """Check at most `count` proposed tokens; returns the new ones, at least one, up to an end token."""
        drafted, distributions = self.draft.propose(count, self._restrict)
        if len(self.unread) > _MOST_UNREAD:
            self.pending_state()
        reading = self.reader.read(self.unread + drafted, self.state)
        logits = reading.logits[len(self.unread) - 1 :].float().cpu()
        if self.position is not None:
            logits = torch.stack([self._restrict(row, drafted[:place]) for place, row in enumerate(logits)])
        new = self.choice.verify(logits, drafted, distributions)
        self.proposed += len(drafted)
        self.accepted += len(new) - 1
        new = new[: next((place for place, token in enumerate(new) if token in ends), len(new)) + 1]
        self._accept(new, drafted, reading.states)
        return new

    def _accept(self, new: list[int], drafted: list[int], states: dict[int, RecurrentState]) -> None:
        """Continue after new tokens, all but the last of which were drafted and read with these `states`."""
        certain = len(self.unread) + len(new) - 1
        read = max(count for count in states if count <= certain)
        self.state = states[read]
        self.unread = [*(self.unread + drafted)[read:certain], new[-1]]
        self.draft.accept(new)
        for token in new:
            self.position = self.position and self.position.after(token)

    def _restrict(self, logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Logits (V,) for the choice after `tokens` that are not accepted yet, float32 as in `generate()`."""
        position = self.position
        for token in tokens:
            position = position and position.after(token)
        logits = logits.float().cpu()
        return logits if position is None else logits.masked_fill(~position.allowed(), -math.inf)
