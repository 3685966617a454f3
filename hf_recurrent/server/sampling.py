"""The next token of every row of a batch, chosen as `generate()` chooses it for that row alone.

Shape letters: B batch, V vocabulary.
"""

from collections.abc import Sequence

import torch

from hf_recurrent.generation.sampling import Sampling


class TokenSource:
    """The sampling of one row, and its random numbers: as in `generate()` after `torch.manual_seed(seed)`."""

    def __init__(self, sampling: Sampling, seed: int):
        self.sampling, self.generator = sampling, torch.Generator().manual_seed(seed)


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
            probabilities = sampling.processors(None, scores).softmax(-1)
            # As torch.multinomial draws one token of one row, but with one generator per row.
            noise = torch.empty_like(probabilities)
            for part, row in zip(noise, rows, strict=True):
                part.exponential_(generator=sources[row].generator)
            tokens = (probabilities / noise).argmax(-1)
        valid = scores.amax(-1).isfinite().tolist()
        for row, token, is_valid in zip(rows, tokens.tolist(), valid, strict=True):
            chosen[row] = token if is_valid else None
    return chosen
