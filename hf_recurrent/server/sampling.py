"""The next token of every row of a batch, chosen as `generate()` chooses it for that row alone.

Shape letters: B batch, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_recurrent.generation.constraints import Constraint
from hf_recurrent.generation.sampling import Sampling


@dataclass(frozen=True)
class LogitChanges:
    """Changes of the logits of a text that depend on its tokens, before its sampling."""

    presence_penalty: float = 0.0  # subtracted from the logits of generated tokens
    frequency_penalty: float = 0.0  # subtracted from these once for every time that the token was generated
    repetition_penalty: float = 1.0  # as in `generate()`, for tokens read or generated
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of a token and what is added to its logit


class TokenSource:
    """The sampling of one row, and its random numbers: as in `generate()` after `torch.manual_seed(seed)`.

    Changes need the size of the vocabulary, V. A constraint applies after them.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        changes: LogitChanges | None = None,
        vocab_size: int = 0,
        constraint: Constraint | None = None,
    ):
        self.sampling, self.generator = sampling, torch.Generator().manual_seed(seed)
        self._follower = None if constraint is None else constraint.follow()
        # As a request without changes, which costs nothing.
        self.changes = None if changes == LogitChanges() else changes
        if self.changes is not None:
            self._read = torch.zeros(vocab_size, dtype=torch.bool)
            self._counts = torch.zeros(vocab_size)  # of generated tokens
            self._bias = torch.zeros(vocab_size)
            for token, value in self.changes.logit_bias:
                self._bias[token] = value

    @property
    def is_changing(self) -> bool:
        return self.changes is not None or self._follower is not None

    @property
    def has_ended(self) -> bool:
        """True if the constraint has the end of the text."""
        return self._follower is not None and self._follower.has_ended

    def read(self, tokens: Sequence[int]) -> None:
        """Tokens before the generated ones."""
        if self.changes is not None:
            self._read[torch.as_tensor(tokens, dtype=torch.long)] = True

    def add(self, token: int) -> None:
        """A generated token."""
        if self.changes is not None:
            self._read[token] = True
            self._counts[token] += 1
        if self._follower is not None:
            self._follower.add(token)

    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits (V,) with the changes; -inf for tokens that the constraint does not allow."""
        if (changes := self.changes) is not None:
            logits = logits + self._bias
            if (factor := changes.repetition_penalty) != 1.0:
                logits = torch.where(self._read, torch.where(logits < 0, logits * factor, logits / factor), logits)
            penalty = changes.presence_penalty * (self._counts > 0)
            logits = logits - penalty - changes.frequency_penalty * self._counts
        if self._follower is not None:
            allowed = self._follower.allowed()
            refused = torch.ones(len(logits), dtype=torch.bool)  # a model may have more logits than tokens
            refused[: len(allowed)] = ~allowed
            logits = logits.masked_fill(refused, -torch.inf)
        return logits


def choose_tokens(logits: torch.Tensor, sources: Sequence[TokenSource]) -> list[int | None]:
    """The next token of each row; None where the probabilities are NaN or a constraint allows no token.

    The logits (B, V) are on the CPU, and not changed.
    """
    rows_of: dict[Sampling, list[int]] = {}
    for row, source in enumerate(sources):
        rows_of.setdefault(source.sampling, []).append(row)
    chosen: list[int | None] = [None] * len(sources)
    changing = [row for row, source in enumerate(sources) if source.is_changing]
    if changing:
        logits = logits.clone()
    for row in changing:
        logits[row] = sources[row].changed(logits[row])
    for sampling, rows in rows_of.items():
        # A copy in float32, as in `generate()`.
        scores = logits[rows].float() if len(rows) < len(sources) else logits.float()
        if sampling.is_greedy:
            tokens = scores.argmax(-1)
        else:
            probabilities = sampling.processors(None, scores).softmax(-1)
            # As torch.multinomial draws one token of one row, but with one generator per row.
            noise = torch.empty_like(probabilities)
            for part, row in zip(noise, rows, strict=True):
                part.exponential_(generator=sources[row].generator)
            tokens = (probabilities / noise).argmax(-1)
        valid = scores.amax(-1).isfinite().tolist()
        for row, token, is_valid in zip(rows, tokens.tolist(), valid, strict=True):
            if is_valid:
                chosen[row] = token
                sources[row].add(token)
    return chosen
