"""The next token of every row of a batch, chosen as `generate()` chooses it for that row alone.

Shape letters: B batch, T steps, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_recurrent.generation.token_choice import check_sampling


@dataclass(frozen=True)
class Sampling:
    """How tokens of a row are chosen.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample from the k most likely tokens; 0 for all.
        top_p: sample from the most likely tokens of this probability; 1 for all.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature or 1.0, self.top_k, self.top_p)

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken."""
        return not self.temperature


@dataclass(frozen=True)
class TokenSource:
    """The sampling of one row, and its random numbers: those of `generate()` after `torch.manual_seed(seed)`."""

    sampling: Sampling
    generator: torch.Generator

    @classmethod
    def seeded(cls, sampling: Sampling, seed: int) -> "TokenSource":
        """A source whose tokens depend on the logits and the seed alone."""
        return cls(sampling, torch.Generator().manual_seed(seed))


def choose_tokens(logits: torch.Tensor, sources: Sequence[TokenSource]) -> list[int | None]:
    """The next token of each row; None where the probabilities are NaN.

    Args:
        logits: (B, V), on the CPU.
        sources: of the B rows.
    """
    rows_of: dict[Sampling, list[int]] = {}
    for row, source in enumerate(sources):
        rows_of.setdefault(source.sampling, []).append(row)
    chosen: list[int | None] = [None] * len(sources)
    for sampling, rows in rows_of.items():
        # A copy in float32, as in `generate()`.
        scores = logits[rows].float() if len(rows) < len(sources) else logits.float()
        if sampling.is_greedy:
            tokens = scores.argmax(-1)
        else:
            probabilities = _processors(sampling)(None, scores).softmax(-1)
            # torch.multinomial draws one token of one row so; here each row has a generator of its own.
            noise = torch.empty_like(probabilities)
            for part, row in zip(noise, rows, strict=True):
                part.exponential_(generator=sources[row].generator)
            tokens = (probabilities / noise).argmax(-1)
        valid = scores.amax(-1).isfinite().tolist()
        for row, token, is_valid in zip(rows, tokens.tolist(), valid, strict=True):
            chosen[row] = token if is_valid else None
    return chosen


@lru_cache(maxsize=256)
def _processors(sampling: Sampling) -> LogitsProcessorList:
    """The processors that `generate()` makes of these arguments."""
    processors = LogitsProcessorList()
    if sampling.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Natural logarithms (…, V), float64, of the model's own probabilities, before temperature, top_k and top_p."""
    return logits.double().log_softmax(-1)


def bits(logits: torch.Tensor, tokens: Sequence[int]) -> list[float]:
    """The information, in bits, of each token after its logits (T, V)."""
    rows = torch.arange(len(tokens))
    return (log_probabilities(logits)[rows, torch.tensor(tokens)] / -math.log(2)).tolist()
