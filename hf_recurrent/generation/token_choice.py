"""Choice of the next token from logits, and of the part of a draft that is kept.

Shape letters: T steps, V vocabulary.
"""

from collections.abc import Sequence

import torch

from hf_recurrent.generation.sampling import Sampling, draw


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
