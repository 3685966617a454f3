"""Recurrent units from diagonal state spaces, x' = A x + B u, by zero-order hold.

Shape letters: B streams or batch, T steps, S state width.
"""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..block.recurrent_state import upcast
from .recurrent_unit import ComplexRecurrentUnit, DenseReadOut, RecurrentUnit, copy_log, copy_values, lecun_std

# Of Δ at initialisation, log-uniform.
STEP_RANGE = (0.001, 0.1)


def zero_order_hold(rate: Tensor, frequency: Tensor, step: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """|λ|, the phase of λ = exp(Δ A) and the complex gain (λ - 1) / A, for A = -rate + i frequency and step Δ."""
    log_decay, phase = -step * rate, step * frequency
    # λ - 1 without cancellation.
    decay = torch.exp(log_decay)
    real = torch.expm1(log_decay) * torch.cos(phase) - 2 * torch.sin(phase / 2) ** 2
    return decay, phase, torch.complex(real, decay * torch.sin(phase)) / torch.complex(-rate, frequency)


def as_complex(real: Tensor) -> Tensor:
    """The real numbers with imaginary parts of zero."""
    return torch.complex(real, 0 * real)


def reset_rates_and_steps(unit: RecurrentUnit) -> None:
    """Begin as Mamba-2: uniform rates in `rate_range`, and log-uniform steps in `STEP_RANGE`, after a softplus."""
    rate, step = torch.rand(2, unit.channel_groups, dtype=torch.float32, device=unit.log_rate.device)
    low, high = unit.rate_range
    copy_log(unit.log_rate, low + (high - low) * rate)
    low, high = map(math.log, STEP_RANGE)
    copy_log(unit.step_bias, torch.expm1(torch.exp(low + (high - low) * step)))  # softplus of it is the step


class S5(DenseReadOut, ComplexRecurrentUnit):
    """Diagonal state space with dense maps in and out (Smith et al. 2023), in S4D's parameters (Gu et al. 2022).

    A = -e^α + i ω, step Δ = e^δ, zero-order hold:  λ = exp(Δ A),  h_t = λ ∘ h_{t-1} + (λ - 1) / A ∘ (B u),
    y_t = Re(C h_t).  Starts as S4D-Lin: A_n = -1/2 + iπn in blocks of 32 channels, Δ log-uniform in [0.001, 0.1].
    """

    input_maps = ("input_projection",)
    vectors = ("log_rate", "frequency", "log_step")
    block_channels = 32

    def reset_parameters(self) -> None:
        channel = torch.arange(self.channel_groups, dtype=torch.float32, device=self.frequency.device)
        init.constant_(self.log_rate, math.log(0.5))
        copy_values(self.frequency, math.pi * (channel % self.block_channels))
        init.uniform_(self.log_step, *map(math.log, STEP_RANGE))

    def coefficients(self, projection):
        projection, log_rate, frequency, log_step = map(
            upcast, (projection, self.log_rate, self.frequency, self.log_step)
        )
        decay, phase, gain = zero_order_hold(torch.exp(log_rate), frequency, torch.exp(log_step))
        return self.eigenvalue(decay, phase), gain * torch.complex(*projection.chunk(2, -1))


class GSS(ComplexRecurrentUnit):
    """State space of a gated state space layer, whose gate is the block's (Mehta et al. 2022, section 3).

    u = GeLU(W_u x) is narrow, and each of its channels drives N = 2 complex numbers of state:
    A = -e^α + i e^ω, λ = exp(A),  h_t = λ ∘ h_{t-1} + (λ - 1) / A ∘ u_t,  y_t = W (Re Σ_n C h_t + D ∘ u_t).

    The paper has N = 512, with the same eigenvalues for all channels; here each channel has its own. W widens the
    channels to S numbers again, for the product with the block's gate. Eigenvalues start at random, as there.
    """

    input_maps = ("input_projection",)
    state_per_output = 4  # 2 N for each channel

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        self.channels, self.output_size = self.output_size, state_size
        self.log_rate = nn.Parameter(torch.empty(state_size // 2))
        self.log_frequency = nn.Parameter(torch.empty(state_size // 2))
        self.state_weight = nn.Parameter(torch.empty(state_size))
        self.skip_weight = nn.Parameter(torch.empty(self.channels))
        self.expansion = nn.Linear(self.channels, state_size, bias=False)

    def reset_parameters(self) -> None:
        for vector in (self.log_rate, self.log_frequency, self.state_weight, self.skip_weight):
            init.normal_(vector, mean=0.0, std=1.0)

    def coefficients(self, projection):
        projection, log_rate, log_frequency = map(upcast, (projection, self.log_rate, self.log_frequency))
        decay, phase, gain = zero_order_hold(torch.exp(log_rate), torch.exp(log_frequency), 1.0)
        inputs = nn.functional.gelu(projection)
        return self.eigenvalue(decay, phase), gain * as_complex(torch.cat([inputs, inputs], -1))

    def read_out(self, states, projection):
        # With h as real numbers, the real part of any complex C h is a real sum.
        state_weight, skip_weight = map(upcast, (self.state_weight, self.skip_weight))
        of_state = (state_weight * states).unflatten(-1, (-1, self.channels)).sum(-2)
        output = of_state + skip_weight * nn.functional.gelu(upcast(projection))
        return self.expansion(output.to(self.expansion.weight.dtype))


class H3(ComplexRecurrentUnit):
    """Shift and diagonal state spaces between products, heads of one channel (Fu et al. 2023, section 3).

    s_t = w_0 ∘ k_t + w_1 ∘ k_{t-1},  h_t = λ ∘ h_{t-1} + (λ - 1) / A ∘ s_t ∘ v_t,
    y_t = q_t ∘ (Re(C h_t) + D ∘ s_t ∘ v_t), with linear maps q, k and v of the input, λ and A as in [`S5`].

    The state is (k_t, Re h_t, k_{t-1}, Im h_t): the shift is a complex step k_t + i k_{t-1} with a = 0. A channel has
    these two taps and one complex number h, where the paper has 64 numbers each; it starts as S4D's first, A = -1/2.
    A padded step must not come before a real one of its row.
    """

    input_maps = ("query", "key", "value")
    state_per_output = 4

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        width = self.output_size
        self.shift_weight = nn.Parameter(torch.empty(2 * width))
        self.log_rate = nn.Parameter(torch.empty(width))
        self.frequency = nn.Parameter(torch.empty(width))
        self.log_step = nn.Parameter(torch.empty(width))
        self.state_weight = nn.Parameter(torch.empty(2 * width))
        self.skip_weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        init.constant_(self.log_rate, math.log(0.5))
        init.zeros_(self.frequency)
        init.uniform_(self.log_step, *map(math.log, STEP_RANGE))
        for weight in (self.shift_weight, self.state_weight):
            init.normal_(weight, mean=0.0, std=lecun_std(2))
        init.normal_(self.skip_weight, mean=0.0, std=1.0)

    def recur(self, projections, state, reset_mask=None, padding_mask=None):
        _, key, value = map(upcast, projections)
        last = torch.cat([state[:, : self.output_size].unsqueeze(1), key[:, :-1]], 1)
        if reset_mask is not None:
            last = last.masked_fill(reset_mask.unsqueeze(-1), 0)
        return super().recur((key, last, value), state, reset_mask, padding_mask)

    def shifted(self, key: Tensor, last: Tensor) -> Tensor:
        """Output of the shift state space from the keys of a step and of the step before it."""
        now, before = upcast(self.shift_weight).chunk(2, -1)
        return now * key + before * last

    def coefficients(self, key, last, value):
        """(a, b) of the taps and of h; `last` are the keys of the step before each step."""
        log_rate, frequency, log_step = map(upcast, (self.log_rate, self.frequency, self.log_step))
        decay, phase, gain = zero_order_hold(torch.exp(log_rate), frequency, torch.exp(log_step))
        eigenvalue = self.eigenvalue(torch.cat([0 * decay, decay], -1), torch.cat([phase, phase], -1))
        product = gain * as_complex(self.shifted(key, last) * value)
        return eigenvalue, torch.cat([torch.complex(key, last), product], -1)

    def read_out(self, states, query, key, value):
        query, value, state_weight, skip_weight = map(upcast, (query, value, self.state_weight, self.skip_weight))
        key, real, last, imaginary = states.chunk(4, -1)
        of_real, of_imaginary = state_weight.chunk(2, -1)
        product = self.shifted(key, last) * value
        return query * (of_real * real + of_imaginary * imaginary + skip_weight * product)


class Mamba2(RecurrentUnit):
    """Selective state space of Mamba-2 (Dao and Gu 2024, sections 5.1 and 7), heads of one channel.

    Δ = softplus(W_Δ u + δ),  x, B, C = SiLU of linear maps of u,
    h_t = exp(-Δ e^α) h_{t-1} + Δ x B,  y_t = C · h_t + D x, with N = 4 numbers in h, B and C of each head.

    The state of width S = N · G is (N, G), with G heads. It is a Mamba-2 of heads of width 1 with as many groups of B
    and C as heads: no head shares a parameter with another one, so `rtrl` is exact. The published heads are 64 wide
    and share B and C, N is 64 to 256, and a convolution comes before the SiLU; here Hawk's block has one. The gate and
    the norm after the unit are the block's.
    """

    channel_maps = ("step_size", "input_projection")
    wide_maps = ("key", "query")
    vectors = ("step_bias", "log_rate", "skip_weight")
    state_per_output = 4
    rate_range = (1.0, 16.0)

    def reset_parameters(self) -> None:
        reset_rates_and_steps(self)
        init.ones_(self.skip_weight)

    def coefficients(self, step_size, projection, key, query):
        step_size, projection, key, bias, log_rate = map(
            upcast, (step_size, projection, key, self.step_bias, self.log_rate)
        )
        step = nn.functional.softplus(step_size + bias)
        log_decay = -step * torch.exp(log_rate)
        decay = torch.exp(log_decay)
        if self.allow_negative_eigenvalues:
            decay = decay + torch.expm1(log_decay)
        scaled = step * nn.functional.silu(projection)
        numbers = self.state_per_output
        return torch.cat([decay] * numbers, -1), nn.functional.silu(key) * torch.cat([scaled] * numbers, -1)

    def read_out(self, states, step_size, projection, key, query):
        query, projection, skip_weight = map(upcast, (query, projection, self.skip_weight))
        of_state = (nn.functional.silu(query) * states).unflatten(-1, (self.state_per_output, -1)).sum(-2)
        return of_state + skip_weight * nn.functional.silu(projection)
