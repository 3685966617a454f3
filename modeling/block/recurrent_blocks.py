"""Parts that the blocks of all families share: norms, the contracting map, the temporal convolution.

Shape letters: B streams or batch, T steps, S state width, K convolution taps.
"""

import math

import torch
from torch import nn
from transformers import initialization as init


def layer_norm(hidden: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension, without learnable parameters."""
    return nn.functional.layer_norm(hidden, hidden.shape[-1:], eps=eps)


class Contraction(nn.Linear):
    """The map of a block back to the residual stream, without bias: its initialisation knows the model's depth."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)


class TemporalConvolution(nn.Module):
    """Depthwise causal convolution over time that does not see across a reset: y_t = Σ_k w_k ∘ x_{t-k}.

    Its taps, the last K-1 inputs of the running episode, are part of the state.
    """

    def __init__(self, channels: int, kernel_size: int):
        super().__init__()
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(torch.empty(kernel_size, channels))

    def reset_parameters(self) -> None:
        init.normal_(self.weight, mean=0.0, std=1 / math.sqrt(self.kernel_size))

    def forward(
        self,
        inputs: torch.Tensor,
        taps: torch.Tensor,
        reset_mask: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a block.

        Args:
            inputs: (B, T, S).
            taps: (B, K-1, S), the inputs before the block, oldest first; zero where another episode ended.
            reset_mask: (B, T) bool.
            lengths: (B,), how many of the T steps are real; None for all.

        Returns:
            The output (B, T, S) and the taps after the last real step, (B, K-1, S).
        """
        return temporal_convolution(inputs, taps, self.weight, reset_mask, lengths)


def temporal_convolution(
    inputs: torch.Tensor,
    taps: torch.Tensor,
    weight: torch.Tensor,
    reset_mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y_t = Σ_k w_k ∘ x_{t-k} with weights (K, S); see [`TemporalConvolution`]."""
    kernel_size = weight.shape[0]
    steps, history = inputs.shape[1], kernel_size - 1
    padded = torch.cat([taps.to(inputs.dtype), inputs], dim=1)
    episode = None
    if reset_mask is not None:
        # Number of the episode at each step; only taps of the same episode count.
        episode = nn.functional.pad(reset_mask.cumsum(1), (history, 0))

    output = inputs * weight[0].to(inputs.dtype)
    for lag in range(1, kernel_size):
        start = history - lag
        delayed = padded[:, start : start + steps]
        if episode is not None:
            other = episode[:, start : start + steps] != episode[:, history:]
            delayed = delayed.masked_fill(other.unsqueeze(-1), 0)
        output = output + delayed * weight[lag].to(inputs.dtype)

    if lengths is None:
        # A copy: a slice would keep the whole block in memory.
        last = padded[:, steps:].clone(memory_format=torch.contiguous_format)
        last_episode = None if episode is None else episode[:, steps:]
        current = None if episode is None else episode[:, -1:]
    else:
        index = lengths.unsqueeze(1) + torch.arange(history, device=inputs.device)
        last = padded.gather(1, index.unsqueeze(-1).expand(-1, -1, inputs.shape[-1]))
        last_episode = None if episode is None else episode.gather(1, index)
        current = None if episode is None else episode.gather(1, lengths.unsqueeze(1) + history - 1)
    if episode is not None:
        last = last.masked_fill((last_episode != current).unsqueeze(-1), 0)
    return output, last.to(taps.dtype)
