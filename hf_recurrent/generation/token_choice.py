"""Choice of the next token from logits, and of what is kept of a draft.

Shape letters: V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch


class TokenChoice(Protocol):
    """How tokens are chosen. All logits are float32 or wider and on the CPU."""

    def propose(self, logits: torch.Tensor) -> tuple[int, torch.Tensor | None]:
        """A token from logits (V,), and the distribution (V,) that it was drawn from, if `verify` needs it."""

    def verify(
        self, logits: torch.Tensor, draft: Sequence[int], distributions: Sequence[torch.Tensor | None]
    ) -> list[int]:
        """The tokens that are kept.

        Args:
            logits: (… + 1, V), of the model that decides, before each drafted token and after the last.
            draft: the drafted tokens.
            distributions: those that the tokens were drawn from; None for a draft without chance.

        Returns:
            The accepted tokens, and one more from the model itself.
        """


class Greedy:
    """The most likely token."""

    def propose(self, logits: torch.Tensor) -> tuple[int, None]:
        return int(logits.argmax()), None

    def verify(self, logits, draft, distributions) -> list[int]:
        best = logits.argmax(-1).tolist()
        accepted = next((place for place, token in enumerate(draft) if token != best[place]), len(draft))
        return best[: accepted + 1]


class Sampling:
    """Sampling with a temperature, from the most likely tokens only if `top_k` or `top_p` say so.

    `verify` is the rejection sampling of Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023: each kept token is
    distributed as if the model itself had drawn it, whatever the draft.

    Args:
        temperature: divides the logits.
        top_k: number of most likely tokens that are kept; 0 for all.
        top_p: keep the most likely tokens that together have at least this probability; 1 for all.
        generator: of the random numbers; torch's global one by default.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ):
        check_sampling(temperature, top_k, top_p)
        self.temperature, self.top_k, self.top_p, self.generator = temperature, top_k, top_p, generator

    def propose(self, logits: torch.Tensor) -> tuple[int, torch.Tensor]:
        probabilities = self.probabilities(logits)
        return self._draw(probabilities), probabilities

    def verify(self, logits, draft, distributions) -> list[int]:
        target = self.probabilities(logits)
        kept: list[int] = []
        for place, (token, proposed) in enumerate(zip(draft, distributions, strict=True)):
            p = target[place]
            q = 1.0 if proposed is None else float(proposed[token])
            if self._uniform() * q < float(p[token]):
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

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The distributions (…, V), float64, that tokens are drawn from, given logits (…, V)."""
        return sampling_probabilities(logits, self.temperature, self.top_k, self.top_p)

    def _uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))

    def _draw(self, weights: torch.Tensor) -> int:
        return int(draw(weights, torch.tensor(self._uniform(), dtype=torch.float64)))


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise a ValueError that names the first argument of sampling that is out of range."""
    if not (math.isfinite(temperature) and temperature >= 1e-6):
        raise ValueError(f"`temperature` is {temperature}; it must be at least 1e-6. For 0, use `do_sample=False`.")
    if top_k < 0:
        raise ValueError(f"`top_k` is {top_k}; it must be at least 0.")
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` is {top_p}; it must be more than 0 and at most 1.")


def sampling_probabilities(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The distributions (…, V), float64, of sampling with these arguments.

    Raises:
        ValueError: the logits are NaN, or allow no token.
    """
    scores = logits.double() / temperature
    if 0 < top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    probabilities = scores.softmax(-1)
    if probabilities.isnan().any():
        raise ValueError("The model's probabilities are NaN.")
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays if those before it do not reach `top_p` yet.
        dropped = (ordered.cumsum(-1) - ordered >= top_p).scatter(-1, order, ordered.cumsum(-1) - ordered >= top_p)
        probabilities = probabilities.masked_fill(dropped, 0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token from each row of weights (…, V), which need no sum of one, with a number in [0, 1) per row."""
    sums = weights.cumsum(-1)
    place = (sums <= (uniform.to(sums) * sums[..., -1]).unsqueeze(-1)).sum(-1)
    # Rounding must not choose a token of weight zero at the end.
    last = (weights > 0).double().mul(torch.arange(weights.shape[-1], device=weights.device)).amax(-1).long()
    return torch.minimum(place, last)
