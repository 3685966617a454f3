"""Depthwise causal convolution with its taps at chosen positions: fixed dilations or learned spacings.

y_t = Σ_n k_n ∘ x_{t-n}, n = 0 … Γ, with the kernel k_n = Σ_i w_i ∘ c(n, p_i) (mGRADE, equations 5 and 8 to 10):
c is 1 where n = p_i for fixed positions, and the Gaussian exp(-((n - p_i) / σ)² / 2) for learned, real ones.

Shape letters: B streams or batch, T steps, M model width, K convolution taps. Γ is the receptive field.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..block.recurrent_blocks import delayed, episode_numbers, last_inputs
from ..block.recurrent_state import upcast
from ..units.recurrent_unit import copy_values

# Up to this number of lags, adding shifted inputs is faster than two Fourier transforms.
_MOST_SHIFTS = 24
# Beyond this number of σ the Gaussian is below 1e-16, the rounding of a float64 sum.
_GAUSSIAN_REACH = 8.6


def clip(positions: Tensor, receptive_field: int) -> Tensor:
    """Positions clipped to [0, Γ], with the gradient of unclipped ones, so that a position outside can return."""
    return positions + (positions.clamp(0, receptive_field) - positions).detach()


def _fast_length(length: int) -> int:
    """The next length with at most one small odd factor, for which Fourier transforms are fast."""
    unit = 1 << max((length - 1).bit_length() - 3, 0)
    return -(-length // unit) * unit


def causal_convolution(signal: Tensor, kernel: Tensor, skip: int = 0) -> Tensor:
    """Depthwise convolution of (B, T, M) with a kernel (n, M) by Fourier transforms: outputs `skip` … T-1.

    The signal is zero before its start; only the first `skip` ≤ n-1 outputs, which are not returned, may be wrong.
    """
    length = signal.shape[1]
    size = _fast_length(length + kernel.shape[0] - 1 - skip)
    # The transform's rounding is relative to the largest value of the signal: in float32 it would exceed the outputs
    # where all inputs are small, and LayerNorm would magnify it.
    wide = torch.float32 if signal.device.type == "mps" else torch.float64
    # Transforms along the last, contiguous dimension are faster.
    spectrum = torch.fft.rfft(signal.to(wide).transpose(1, 2).contiguous(), n=size)
    spectrum = spectrum * torch.fft.rfft(kernel.to(wide).t().contiguous(), n=size)
    return torch.fft.irfft(spectrum, n=size)[..., skip:length].transpose(1, 2).to(signal.dtype)


class DelayConvolution(nn.Module):
    """Depthwise causal convolution over time with K taps, which does not see across a reset.

    Its buffer, the last Γ inputs of the running episode, is part of the state: Γ·M floats a stream.

    A single step reads only the taps' offsets in the buffer: K with fixed positions; with learned ones the
    2·⌈8.6 σ⌉ + 1 around each position where the Gaussian exceeds rounding. It returns a shifted copy and leaves the
    given state unchanged. A block with few lags adds shifted inputs. Otherwise Fourier transforms convolve the dense
    kernel, and each episode that starts inside the block separately, so that nothing crosses a reset.

    Learned positions, one for each tap and channel, are clipped to [0, Γ]; they start at `positions`, or uniformly.
    Fixed positions are integers. `interpolation_width` is σ of the Gaussian around a learned one.
    """

    no_weight_decay = ("positions",)  # decay would pull the taps towards the current step

    def __init__(
        self,
        channels: int,
        positions: Sequence[float],
        receptive_field: int,
        *,
        learned: bool = False,
        uniform: bool = False,
        interpolation_width: float = 0.5,
    ):
        super().__init__()
        self.initial_positions = tuple(positions)
        self.receptive_field = receptive_field
        self.learned = learned
        self.uniform = uniform
        self.interpolation_width = interpolation_width
        self.weight = nn.Parameter(torch.empty(len(positions), channels))
        if learned:
            # Hundreds of steps back, bfloat16 cannot tell one step from the next.
            dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
            self.positions = nn.Parameter(torch.empty(len(positions), channels, dtype=dtype))

    def reset_parameters(self) -> None:
        """Weights of variance 1/K, and the initial positions."""
        taps = len(self.initial_positions)
        init.normal_(self.weight, mean=0.0, std=1 / math.sqrt(taps))
        if not self.learned:
            return
        if self.uniform:
            init.uniform_(self.positions, 0.0, float(self.receptive_field))
        else:
            start = torch.tensor(self.initial_positions, dtype=self.positions.dtype, device=self.positions.device)
            copy_values(self.positions, start.unsqueeze(1).expand_as(self.positions))

    def taps(self) -> tuple[Tensor, Tensor]:
        """Lags and weights of all taps, both (lags, M); the kernel is their sum, k_n = Σ_j weight_j with lag_j = n."""
        weight = upcast(self.weight)
        if not self.learned:
            lags = torch.tensor(self.initial_positions, dtype=torch.long, device=weight.device)
            return lags.unsqueeze(1).expand_as(weight), weight
        positions = clip(upcast(self.positions), self.receptive_field)
        reach = min(self.receptive_field, math.ceil(_GAUSSIAN_REACH * self.interpolation_width + 0.5))
        around = torch.arange(-reach, reach + 1, device=weight.device).view(-1, 1, 1)
        lags = positions.detach().round().long() + around
        inside = (lags >= 0) & (lags <= self.receptive_field)
        gaussian = torch.exp(-0.5 * ((lags - positions) / self.interpolation_width) ** 2)
        lags = lags.clamp(0, self.receptive_field)
        return lags.flatten(0, 1), (weight * gaussian * inside).flatten(0, 1)

    def kernel(self) -> Tensor:
        """k_0 … k_Γ, (Γ+1, M)."""
        lags, weights = self.taps()
        return weights.new_zeros(self.receptive_field + 1, weights.shape[1]).scatter_add(0, lags, weights)

    def forward(
        self, inputs: Tensor, buffer: Tensor, reset_mask: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output (B, T, M) of inputs (B, T, M), and the buffer (B, Γ, M) after the last real step.

        `buffer` are the inputs before the block, oldest first, zero where another episode ended; `lengths` (B,) are
        the numbers of real steps, None for all.
        """
        history = self.receptive_field
        if inputs.shape[1] == 1:
            if reset_mask is not None:
                buffer = buffer.masked_fill(reset_mask.unsqueeze(-1), 0)
            output, episode = self._step(inputs, buffer), None
            if lengths is None:
                return output, torch.cat([buffer[:, 1:], inputs.to(buffer.dtype)[:, max(1 - history, 0) :]], dim=1)
        else:
            episode = None if reset_mask is None else episode_numbers(reset_mask, history)
            output = self._block(inputs, buffer.to(inputs.dtype), reset_mask, episode)
        padded = torch.cat([buffer, inputs.to(buffer.dtype)], dim=1)
        return output, last_inputs(padded, history, lengths, episode)

    def _step(self, inputs: Tensor, buffer: Tensor) -> Tensor:
        lags, weights = self.taps()
        now = lags == 0
        output = inputs * (weights * now).sum(0).to(inputs.dtype)
        if self.receptive_field == 0:
            return output
        offsets = (self.receptive_field - lags).clamp(max=self.receptive_field - 1)
        past = buffer.gather(1, offsets.expand(inputs.shape[0], -1, -1)).masked_fill(now, 0)
        return output + (past * weights).sum(1, keepdim=True).to(inputs.dtype)

    def _block(self, inputs: Tensor, buffer: Tensor, reset_mask: Tensor | None, episode: Tensor | None) -> Tensor:
        padded = torch.cat([buffer, inputs], dim=1)
        if self.learned:
            lags, weights = range(self.receptive_field + 1), None
        else:
            lags, weights = [int(position) for position in self.initial_positions], self.weight
        if len(lags) <= _MOST_SHIFTS:
            output = torch.zeros_like(inputs)
            weights = self.kernel() if weights is None else weights
            for lag, weight in zip(lags, weights.to(inputs.dtype), strict=True):
                output = torch.addcmul(output, delayed(padded, self.receptive_field, lag, episode), weight)
            return output
        kernel = self.kernel()
        if reset_mask is None:
            return causal_convolution(padded, kernel, self.receptive_field)
        if torch.compiler.is_compiling():
            # The shapes below depend on the positions of the resets, which a compiled graph does not know.
            return self._masked_windows(padded, episode, kernel)
        padded = torch.cat([buffer.masked_fill(reset_mask[:, :1].unsqueeze(-1), 0), inputs], dim=1)
        output = causal_convolution(padded, kernel, self.receptive_field)
        return _replace_later_episodes(output, inputs, reset_mask, kernel)

    def _masked_windows(self, padded: Tensor, episode: Tensor, kernel: Tensor) -> Tensor:
        size = self.receptive_field + 1
        episode = episode.unfold(1, size, 1)
        windows = padded.unfold(1, size, 1).masked_fill((episode != episode[..., -1:]).unsqueeze(2), 0)
        return (windows * kernel.flip(0).t().to(windows.dtype)).sum(-1)


def _replace_later_episodes(output, inputs, reset_mask, kernel) -> Tensor:
    """The output with every episode that starts after the first step convolved separately.

    Episodes of similar length run together, padded to a power of two, so that all of them cost little more than the
    block. `output` (B, T, M) is correct up to each stream's first reset after the first step.
    """
    steps = inputs.shape[1]
    rows, starts = reset_mask[:, 1:].nonzero(as_tuple=True)
    if len(rows) == 0:
        return output
    starts = starts + 1
    ends = torch.full_like(starts, steps)
    ends[:-1] = torch.where(rows[1:] == rows[:-1], starts[1:], steps)
    lengths = ends - starts
    steps_of_results, results = [], []
    for exponent in range((int(lengths.max()) - 1).bit_length() + 1):
        size = 1 << exponent
        chosen = (lengths > size // 2) & (lengths <= size)
        if not bool(chosen.any()):
            continue
        offsets = torch.arange(size, device=inputs.device)
        row, time = rows[chosen].unsqueeze(1), starts[chosen].unsqueeze(1) + offsets
        real = offsets < lengths[chosen].unsqueeze(1)
        episodes = inputs[row, time.clamp(max=steps - 1)].masked_fill(~real.unsqueeze(-1), 0)
        results.append(causal_convolution(episodes, kernel[:size])[real])
        steps_of_results.append((row * steps + time)[real])
    return output.flatten(0, 1).index_copy(0, torch.cat(steps_of_results), torch.cat(results)).view_as(output)
