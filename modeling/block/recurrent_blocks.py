"""Parts that the blocks of all families share: norms, a gate, the contracting map, the temporal convolution.

Shape letters: B streams or batch, T steps, S state width, K convolution taps.
"""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .training_kernels import KernelFunction, is_plain_layer, layer_kernels


def layer_norm(hidden: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension, without learnable parameters."""
    return nn.functional.layer_norm(hidden, hidden.shape[-1:], eps=eps)


def rms_norm(norm: nn.Module, hidden: Tensor) -> Tensor:
    """`norm(hidden)` for an `nn.RMSNorm` over the last dimension, in one pass over memory; other modules are called.

    A kernel on a GPU rounds to autocast's type, as the products that follow would.
    """
    is_simple = is_plain_layer(norm, nn.RMSNorm) and len(norm.normalized_shape) == 1 and norm.eps is not None
    if is_simple and (kernels := layer_kernels(hidden, norm.weight)) is not None:
        return _RmsNorm.apply(kernels, "rms_norm", 1, (norm.eps,), hidden, norm.weight)
    return norm(hidden)


class _RmsNorm(KernelFunction):
    pass


def gated_gelu(gate: Tensor, value: Tensor) -> Tensor:
    """GeLU(gate) ∘ value, element by element, of one shape and type, in one pass over memory."""
    if gate.shape == value.shape and (kernels := layer_kernels(gate, value)) is not None:
        return _GatedGelu.apply(kernels, "gated_gelu", 1, (), gate, value)
    return nn.functional.gelu(gate) * value


class _GatedGelu(KernelFunction):
    pass


def resets_itself(module: nn.Module) -> bool:
    """True for modules of ours that initialise their own tensors."""
    return hasattr(module, "reset_parameters") and not type(module).__module__.startswith("torch.nn.")


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
        self, inputs: Tensor, taps: Tensor, reset_mask: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output (B, T, S) of inputs (B, T, S), and the taps (B, K-1, S) after the last real step.

        `taps` are the inputs before the block, oldest first, zero where another episode ended; `lengths` (B,) are the
        numbers of real steps, None for all.
        """
        return temporal_convolution(inputs, taps, self.weight, reset_mask, lengths)


def temporal_convolution(
    inputs: Tensor, taps: Tensor, weight: Tensor, reset_mask: Tensor | None = None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y_t = Σ_k w_k ∘ x_{t-k} with weights (K, S); see [`TemporalConvolution`]."""
    kernel_size = weight.shape[0]
    history = kernel_size - 1
    dtype, taps = taps.dtype, taps.to(inputs.dtype)
    episode = None if reset_mask is None else episode_numbers(reset_mask, history)
    if history and inputs.numel() and (kernels := layer_kernels(inputs, taps, weight)) is not None:
        output = _FusedConvolution.apply(kernels, "temporal_convolution", 1, (), inputs, taps, weight, reset_mask)
        recent = inputs[:, -history:] if lengths is None else inputs
        return output, taps_after(taps, recent, lengths, episode).to(dtype)
    padded = torch.cat([taps, inputs], dim=1)
    output = inputs * weight[0].to(inputs.dtype)
    for lag in range(1, kernel_size):
        output = output + delayed(padded, history, lag, episode) * weight[lag].to(inputs.dtype)
    return output, last_inputs(padded, history, lengths, episode).to(dtype)


class _FusedConvolution(KernelFunction):
    pass


def episode_numbers(reset_mask: Tensor, history: int) -> Tensor:
    """Number of the episode at each of the `history` steps before a block, and at the block's T steps."""
    return nn.functional.pad(reset_mask.cumsum(1), (history, 0))


def delayed(padded: Tensor, history: int, lag: int, episode: Tensor | None) -> Tensor:
    """The inputs (B, T, S) `lag` steps before each step of a block, zero where they are of another episode.

    `padded` and `episode` (None for one episode) have `history` steps before the block, then the block's.
    """
    start, end = history - lag, padded.shape[1] - lag
    inputs = padded[:, start:end]
    if episode is None or lag == 0:
        return inputs
    return inputs.masked_fill((episode[:, start:end] != episode[:, history:]).unsqueeze(-1), 0)


def taps_after(taps: Tensor, inputs: Tensor, lengths: Tensor | None, episode: Tensor | None) -> Tensor:
    """The taps (B, K-1, S) after a block whose inputs, or without `lengths` at least the last K-1, follow others."""
    recent = torch.cat([taps, inputs], dim=1)
    if episode is not None:
        episode = episode[:, -recent.shape[1] :]
    return last_inputs(recent, taps.shape[1], lengths, episode)


def last_inputs(padded: Tensor, history: int, lengths: Tensor | None, episode: Tensor | None) -> Tensor:
    """The last inputs (B, history, S) of the episode that runs at the end of each row; see [`delayed`].

    `lengths` (B,) are the numbers of real steps, or None if all are.
    """
    if lengths is None:
        steps = padded.shape[1] - history
        # A copy: a slice would keep the whole block in memory.
        last = padded[:, steps:].clone(memory_format=torch.contiguous_format)
        other = None if episode is None else episode[:, steps:] != episode[:, -1:]
    else:
        index = lengths.unsqueeze(1) + torch.arange(history, device=padded.device)
        last = padded.gather(1, index.unsqueeze(-1).expand(-1, -1, padded.shape[-1]))
        newest = (lengths + history - 1).clamp(min=0).unsqueeze(1)
        other = None if episode is None else episode.gather(1, index) != episode.gather(1, newest)
    return last if other is None else last.masked_fill(other.unsqueeze(-1), 0)
