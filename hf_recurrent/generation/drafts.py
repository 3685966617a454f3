"""Drafts of speculative decoding: a smaller model, or text that occurred before."""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hf_recurrent.generation.state_reader import StateReader
from hf_recurrent.generation.token_choice import TokenChoice
from hf_recurrent.modeling.block.recurrent_state import RecurrentState

# How many of the last tokens are looked up, the most first.
_LOOKUP_LENGTHS = (16, 8, 4)

# Logits (V,) and the tokens that were drafted before them → the logits to choose from.
Restriction = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


class Draft(Protocol):
    """Proposes the next tokens of one text."""

    forwards: int  # forward passes so far

    def begin(self, prompt: torch.Tensor) -> None:
        """Read the prompt (1, T)."""

    def propose(self, count: int, restrict: Restriction) -> tuple[list[int], list[torch.Tensor | None]]:
        """At most `count` next tokens, and the distribution (V,) that each was drawn from, or None."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Continue after new tokens: all but the last are those that were proposed."""

    def state(self) -> RecurrentState | None:
        """The state after all tokens but the last."""

    def final_state(self) -> RecurrentState | None:
        """The state after all tokens."""


class ModelDraft:
    """A model that proposes one token after another from its own state.

    Args:
        reader: of the model.
        state: of the text before the prompt; the zero state by default.
        choice: how tokens are chosen.
    """

    def __init__(self, reader: StateReader, state: RecurrentState | None, choice: TokenChoice):
        self._reader, self._choice = reader, choice
        self._states = [state]  # after the tokens that are certain, then after each that was proposed and read
        self._unread: list[int] = []  # certain tokens after the first of these states

    @property
    def forwards(self) -> int:
        return self._reader.forwards

    def begin(self, prompt):
        self._states = [self._reader.read_prompt(prompt, self._states[0])[1]]

    def propose(self, count, restrict):
        tokens: list[int] = []
        distributions: list[torch.Tensor | None] = []
        for _ in range(count):
            logits = self._read([tokens[-1]] if tokens else self._unread)
            token, distribution = self._choice.propose(restrict(logits, tokens))
            tokens.append(token)
            distributions.append(distribution)
        if tokens:
            self._unread, self._states = [], self._states[1:]
        return tokens, distributions

    def accept(self, tokens):
        # The last proposed token was not read.
        read = min(len(tokens), len(self._states)) - 1
        self._states = [self._states[read]]
        self._unread += tokens[read:]

    def state(self):
        if len(self._unread) > 1:
            self._read(self._unread[:-1])
            self._states, self._unread = self._states[1:], self._unread[-1:]
        return self._states[0]

    def final_state(self):
        return self._reader.read(self._unread, self._states[0]).states[len(self._unread)]

    def _read(self, tokens: Sequence[int]) -> torch.Tensor:
        reading = self._reader.read(tokens, self._states[-1])
        self._states.append(reading.states[len(tokens)])
        return reading.logits[-1]


class PromptLookup:
    """Proposes what followed the last time that the text had the same last tokens; it has no model and no state."""

    forwards = 0

    def __init__(self):
        self._text = ""  # one character per token: strings are searched fast

    def begin(self, prompt):
        self.accept(prompt[0].tolist())

    def propose(self, count, restrict):
        text = self._text
        for length in _LOOKUP_LENGTHS:
            place = text.rfind(text[-length:], 0, len(text) - 1) if len(text) > length else -1
            if place >= 0:
                # A text that repeats itself goes on repeating.
                following = itertools.cycle(map(ord, text[place + length :]))
                return list(itertools.islice(following, count)), [None] * count
        return [], []

    def accept(self, tokens):
        self._text += "".join(map(chr, tokens))

    def state(self):
        return None

    final_state = state
