"""Chunks of a block, inside of which a recurrence with a matrix as its state is computed like attention.

Shape letters: B streams or batch, Q steps of a chunk.
"""

import torch

MOST_STEPS = 64  # of a chunk: on a CPU, 32 to 64 are fastest


def same_episode(
    batch_size: int, steps: int, reset_mask: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which steps of a chunk a step sees.

    Args:
        reset_mask: (B, Q) bool, or None.

    Returns:
        (B or 1, Q, Q) bool, true where step s ≤ q is of the episode of step q; (B or 1, Q) bool, true where the
        episode has begun before the chunk.
    """
    causal = torch.ones(steps, steps, dtype=torch.bool, device=device).tril().unsqueeze(0)
    if reset_mask is None:
        return causal, torch.ones(1, steps, dtype=torch.bool, device=device)
    episode = reset_mask.cumsum(1)
    return causal & (episode.unsqueeze(2) == episode.unsqueeze(1)), episode == 0
