"""Sampling: the processors that `generate()` makes of temperature, top-k, top-p and min-p, and draws.

Shape letters: B batch, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


@dataclass(frozen=True)
class Sampling:
    """Sampling of the tokens of a text, with values that [`check_sampling`] allows."""

    temperature: float = 1.0  # divides the logits; 0 takes the most likely token
    top_k: int = 0  # sample from the k most likely tokens; 0 for all
    top_p: float = 1.0  # sample from the most likely tokens that together have this probability
    min_p: float = 0.0  # sample from the tokens with at least this share of the most likely one's probability

    @property
    def is_greedy(self) -> bool:
        return not self.temperature

    @cached_property
    def processors(self) -> LogitsProcessorList:
        """The processors that `generate()` makes of these arguments, for scores (B, V)."""
        processors = LogitsProcessorList()
        if self.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            processors.append(TopPLogitsWarper(self.top_p))
        if self.min_p:
            processors.append(MinPLogitsWarper(self.min_p))
        return processors

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The distributions (B, V), float64, that tokens are drawn from, given logits (B, V)."""
        probabilities = self.processors(None, logits.double()).softmax(-1)
        if probabilities.isnan().any():
            raise ValueError("The model's probabilities are NaN.")
        return probabilities


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token (B,) from each row of weights (B, V), of any positive sum, with a number in [0, 1) per row."""
    sums = weights.cumsum(-1)
    place = (sums <= (uniform.to(sums) * sums[..., -1]).unsqueeze(-1)).sum(-1)
    # Rounding must not choose a token of weight zero at the end.
    last = (weights > 0).double().mul(torch.arange(weights.shape[-1], device=weights.device)).amax(-1).long()
    return torch.minimum(place, last)
