"""Parts of speculative decoding: choices of tokens, and drafts of a smaller model or of text that occurred before.

Shape letters: T steps, V vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hf_recurrent.generation.sampling import Sampling, draw
from hf_recurrent.generation.state_reader import UnreadText
from hf_recurrent.modeling.block.recurrent_state import RecurrentState

# How many of the last tokens are looked up, the most first.
_LOOKUP_LENGTHS = (16, 8, 4)

# Logits (V,) and the tokens that were drafted before them → the logits to choose from.
Restriction = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


class GreedyChoice:
    """The most likely token. All logits are float32 or wider and on the CPU."""

    def propose(self, logits: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        """A token from logits (V,), and the distribution (V,) that it was drawn from, if `verify` needs it."""
        return int(logits.argmax()), None

    def verify(
        self, logits: torch.Tensor, draft: Sequence[int], distributions: Sequence[torch.Tensor | None]
    ) -> list[int]:
        """The accepted tokens of a draft, and one more from the model itself.

        Args:
            logits: (T + 1, V), of the model that decides, before each of T drafted tokens and after the last.
            draft: the drafted tokens.
            distributions: (V,) each, that the tokens were drawn from; None for a draft without chance.
        """
        best = logits.argmax(-1).tolist()
        accepted = next((place for place, token in enumerate(draft) if token != best[place]), len(draft))
        return best[: accepted + 1]


class SampledChoice(GreedyChoice):
    """Sampling.

    `verify` is the rejection sampling of Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023: each kept token is
    distributed as if the model itself had drawn it, whatever the draft.
    """

    def __init__(self, sampling: Sampling, generator: torch.Generator | None = None):
        self.sampling, self.generator = sampling, generator

    def propose(self, logits):
        probabilities = self.sampling.probabilities(logits.unsqueeze(0))[0]
        return self._draw(probabilities), probabilities

    def verify(self, logits, draft, distributions):
        target = self.sampling.probabilities(logits)
        kept: list[int] = []
        for p, token, proposed in zip(target, draft, distributions, strict=False):  # `target` has one row more
            q = 1.0 if proposed is None else float(proposed[token])
            if float(self._uniform()) * q < float(p[token]):
                kept.append(token)
                continue
            # max(p - q, 0), which the draft proposes too rarely.
            rest = p.clone()
            if proposed is None:
                rest[token] = 0
            else:
                rest.sub_(proposed).clamp_(min=0)
            return [*kept, self._draw(rest if rest.any() else p)]
        return [*kept, self._draw(target[-1])]

    def _uniform(self) -> torch.Tensor:
        return torch.rand((), dtype=torch.float64, generator=self.generator)

    def _draw(self, weights: torch.Tensor) -> int:
        return int(draw(weights, self._uniform()))


@dataclass
class ModelDraft(UnreadText):
    """A model that proposes one token after another from its own state, which begins before the prompt."""

    choice: GreedyChoice
    # After the unread tokens, then after each proposed one.
    proposed_states: list[RecurrentState] = field(default_factory=list)

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
        self.proposed_states, state = [], self.state
        for _ in range(count):
            feed = tokens[-1:] or self.unread
            reading = self.reader.read(feed, state)
            state = reading.states[len(feed)]
            self.proposed_states.append(state)
            token, distribution = self.choice.propose(restrict(reading.logits[-1], tokens))
            tokens.append(token)
            distributions.append(distribution)
        return tokens, distributions

    def accept(self, tokens: Sequence[int]) -> None:
        """Continue after new tokens: all but the last were proposed."""
        if not self.proposed_states:
            self.unread = [*self.unread, *tokens]
            return
        # The last proposed token was not read.
        read = min(len(tokens), len(self.proposed_states)) - 1
        self.state, self.proposed_states = self.proposed_states[read], []
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
