"""Drafts of speculative decoding: a smaller model, or text that occurred before.

Shape letters: T steps, V vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from hf_recurrent.generation.state_reader import StateReader, UnreadText
from hf_recurrent.generation.token_choice import GreedyChoice
from hf_recurrent.modeling.block.recurrent_state import RecurrentState

# How many of the last tokens are looked up, the most first.
_LOOKUP_LENGTHS = (16, 8, 4)

# Logits (V,) and the tokens that were drafted before them → the logits to choose from.
Restriction = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


class ModelDraft(UnreadText):
    """A model that proposes one token after another from its own state, which begins before the prompt."""

    def __init__(self, reader: StateReader, state: RecurrentState | None, choice: GreedyChoice):
        super().__init__(reader, state)
        self._choice = choice
        self._proposed_states: list[RecurrentState] = []  # after the unread tokens, then after each proposed one

    @property
    def forwards(self) -> int:
        return self.reader.forwards

    def begin(self, prompt: torch.Tensor) -> None:
        """Read the prompt (1, T)."""
        self.state = self.reader.read_prompt(prompt, self.state)[1]

    def propose(self, count: int, restrict: Restriction) -> tuple[list[int], list[torch.Tensor | None]]:
        """At most `count` next tokens, and the distribution (V,) that each was drawn from, or None."""
        tokens: list[int] = []
        distributions: list[torch.Tensor | None] = []
        self._proposed_states, state = [], self.state
        for _ in range(count):
            feed = tokens[-1:] or self.unread
            reading = self.reader.read(feed, state)
            state = reading.states[len(feed)]
            self._proposed_states.append(state)
            token, distribution = self._choice.propose(restrict(reading.logits[-1], tokens))
            tokens.append(token)
            distributions.append(distribution)
        return tokens, distributions

    def accept(self, tokens: Sequence[int]) -> None:
        """Continue after new tokens: all but the last were proposed."""
        if not self._proposed_states:
            self.unread = [*self.unread, *tokens]
            return
        # The last proposed token was not read.
        read = min(len(tokens), len(self._proposed_states)) - 1
        self.state, self._proposed_states = self._proposed_states[read], []
        self.unread = list(tokens[read:])


class PromptLookup:
    """Proposes the tokens that followed the last time that the text had the same last tokens; without a state."""

    forwards = 0

    def __init__(self):
        self._text = ""  # one character per token: strings are searched fast

    def begin(self, prompt: torch.Tensor) -> None:
        """As [`ModelDraft.begin`]."""
        self.accept(prompt[0].tolist())

    def propose(self, count: int, restrict: Restriction) -> tuple[list[int], list[None]]:
        """As [`ModelDraft.propose`]."""
        text = self._text
        for length in _LOOKUP_LENGTHS:
            place = text.rfind(text[-length:], 0, len(text) - 1) if len(text) > length else -1
            if place >= 0:
                # Assume that a repetition continues.
                following = itertools.cycle(map(ord, text[place + length :]))
                return list(itertools.islice(following, count)), [None] * count
        return [], []

    def accept(self, tokens: Sequence[int]) -> None:
        """As [`ModelDraft.accept`]."""
        self._text += "".join(map(chr, tokens))

    def pending_state(self) -> None:
        """None: there is no state."""

    final_state = pending_state
