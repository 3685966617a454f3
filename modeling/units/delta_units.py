"""Recurrent units that remove what is stored at a key before they write to it: the delta rule and its generalisation.

A head keeps a vector h of K numbers, h_t = w ∘ h_{t-1} - b (c · h_{t-1}) + k v, with a value v of one number.

Shape letters: B streams or batch, T steps, S state width, G channel groups, Q steps of a chunk. S = K · G.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..block.recurrent_state import upcast
from .nonlinear_units import SequentialUnit
from .recurrent_unit import copy_values
from .state_space_units import reset_rates_and_steps

# Q. On a CPU, shorter blocks take less time step by step.
CHUNK_STEPS = 16
SHORTEST_IN_CHUNKS = 128
_SMALLEST_SQUARED_NORM = 1e-6


def normalized(numbers: Tensor) -> Tensor:
    """(…, K, G) with a norm of 1 over K."""
    return numbers * torch.rsqrt(numbers.square().sum(-2, keepdim=True) + _SMALLEST_SQUARED_NORM)


class DeltaStep(NamedTuple):
    """Coefficients of a step: log w (…, K or 1, G); c, b and k (…, K, G); v (…, 1, G)."""

    log_decay: Tensor
    read: Tensor
    removed: Tensor
    key: Tensor
    value: Tensor


class DeltaUnit(SequentialUnit):
    """Base class of the units of this file: G heads of one channel, with K = 4 numbers of state, (K, G).

    No head shares a parameter with another one, so `rtrl` is exact. Published heads have 64 to 128 channels with the
    same keys; a subclass may have another `state_per_output`, K.
    """

    channel_maps = ("input_projection",)
    state_per_output = 4

    def delta_step(self, *projections: Tensor) -> DeltaStep:
        """The coefficients of all steps from the projections, float32 or wider."""
        raise NotImplementedError

    def by_head(self, numbers: Tensor) -> Tensor:
        """(…, S) → (…, K, G)."""
        return numbers.unflatten(-1, (self.state_per_output, -1))

    def step(self, state, *projections):
        now, state = self.delta_step(*projections), self.by_head(state)
        stored = (now.read * state).sum(-2, keepdim=True)
        return (torch.exp(now.log_decay) * state - now.removed * stored + now.key * now.value).flatten(-2)

    def recur(self, projections, state, reset_mask=None, padding_mask=None):
        steps = projections[0].shape[1]
        if steps < SHORTEST_IN_CHUNKS:
            return super().recur(projections, state, reset_mask, padding_mask)
        now = self.delta_step(*map(upcast, projections))
        if padding_mask is not None:
            kept = padding_mask[..., None, None]
            now = DeltaStep(*(numbers.masked_fill(kept, 0) for numbers in now))
        state, states = self.by_head(state), []
        for start in range(0, steps, CHUNK_STEPS):
            chunk = slice(start, start + CHUNK_STEPS)
            reset = None if reset_mask is None else reset_mask[:, chunk]
            states.append(delta_chunk(DeltaStep(*(numbers[:, chunk] for numbers in now)), state, reset))
            state = states[-1][:, -1]
        return torch.cat(states, 1).flatten(-2), state.flatten(-2).clone()  # not a view of the last chunk


def delta_chunk(now: DeltaStep, state: Tensor, reset_mask: Tensor | None = None) -> Tensor:
    """The states after each step of a chunk, (B, Q, K, G), by one triangular system (Yang et al. 2024, section 3.3).

    With E_ij the decay from step j to step i, h_i = E_i h_0 + Σ_{j ≤ i} E_ij (k_j v_j - b_j u_j), where
    u_i = c_i · h_{i-1} depends on earlier u only.
    The state h_0 is (B, K, G), and zero before the steps where `reset_mask` (B, Q) is true.
    """
    steps = now.key.shape[1]
    causal = torch.ones(steps, steps, dtype=torch.bool, device=state.device).tril()[None, None]
    since = torch.ones(1, 1, steps, 1, dtype=torch.bool, device=state.device)
    if reset_mask is not None:
        episode = reset_mask.cumsum(1)[:, None, :, None]
        causal, since = causal & (episode == episode.mT), episode == 0
    log_decay, read, removed, key, value = (numbers.permute(0, 3, 1, 2) for numbers in now)  # (B, G, Q, K or 1)
    total = log_decay.cumsum(2)
    last = total - log_decay
    if total.shape[-1] == 1:
        between, before = (
            (after - total.mT).masked_fill(~seen, -torch.inf).exp()
            for after, seen in ((total, causal), (last, causal.tril(-1)))
        )
        rise, fall, fall_before = 1, 1, 1
    else:  # E_ij as a product; decays must be bounded below, so that e^{-total} does not overflow
        between, before = causal.to(total.dtype), causal.tril(-1).to(total.dtype)
        rise, fall, fall_before = torch.exp(-total), torch.exp(total), torch.exp(last)
    from_state = since * state.transpose(1, 2).unsqueeze(2)
    reads = read * fall_before
    known = (reads @ (key * rise).mT * before) @ value + (read * last.exp() * from_state).sum(-1, keepdim=True)
    system = reads @ (removed * rise).mT * before
    stored = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    added = (key * value - removed * stored) * rise
    return (fall * (between @ added) + total.exp() * from_state).permute(0, 2, 3, 1)


class GatedDelta(DeltaUnit):
    """Gated delta rule (Yang et al. 2024, equation 10), the recurrence of Qwen3-Next, in heads of one channel.

    α = exp(-e^a softplus(W_α u + δ)),  β = σ(W_β u),  v, k and q: SiLU of linear maps, k and q with a norm of 1,
    h_t = α (h_{t-1} - β k (k · h_{t-1})) + β k v,  y_t = q · h_t / √K.

    `allow_negative_eigenvalues` doubles β (Grazzi et al. 2024). A convolution comes before the published SiLU; here
    Hawk's block has one. The gate and the norm after the unit are the block's.
    """

    channel_maps = ("step_size", "write_gate", "input_projection")
    wide_maps = ("key", "query")
    vectors = ("step_bias", "log_rate")
    negative_refusal = None
    rate_range = (1.0, 16.0)

    def reset_parameters(self) -> None:
        reset_rates_and_steps(self)

    def delta_step(self, step_size, write_gate, value, key, query):
        bias, log_rate = map(upcast, (self.step_bias, self.log_rate))
        log_decay = (-torch.exp(log_rate) * nn.functional.softplus(step_size + bias)).unsqueeze(-2)
        written = torch.sigmoid(write_gate).unsqueeze(-2) * (2 if self.allow_negative_eigenvalues else 1)
        key = normalized(self.by_head(nn.functional.silu(key)))
        value = nn.functional.silu(value).unsqueeze(-2)
        return DeltaStep(log_decay, torch.exp(log_decay) * key, written * key, written * key, value)

    def read_out(self, states, step_size, write_gate, value, key, query):
        query = normalized(self.by_head(nn.functional.silu(upcast(query)))) * self.state_per_output**-0.5
        return (query * self.by_head(states)).sum(-2)


class RWKV7(DeltaUnit):
    """The state of RWKV-7 (Peng et al. 2025, section 4), in heads of one channel.

    w = exp(-e^{-1/2} σ(d)),  a = σ(W_a u + a_0),  κ = k ∘ ξ with a norm of 1,  k̃ = k ∘ (1 + (a - 1) ∘ α),
    h_t = w ∘ h_{t-1} - (a ∘ κ) (κ · h_{t-1}) + k̃ v,  y_t = r · h_t + (r ∘ ρ · k̃) v,
    with d = W_d u + d_0 and linear maps r, k and v. The published maps of a and d have low rank; token shift, the norm
    of a head, the gate, and values mixed with the first layer's are left out, or the block's.
    """

    wide_maps = ("decay", "rate", "key", "query")
    negative_refusal = "removes more than it keeps already; leave it False"
    state_vectors = ("decay_bias", "rate_bias", "removal_scale", "replacement_mix", "bonus")

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        for name in self.state_vectors:
            setattr(self, name, nn.Parameter(torch.empty(state_size)))

    def reset_parameters(self) -> None:
        bias = self.decay_bias
        copy_values(bias, torch.linspace(-6.5, -1.5, len(bias), dtype=torch.float32, device=bias.device))
        init.constant_(self.removal_scale, 0.85)
        init.ones_(self.replacement_mix)
        init.zeros_(self.rate_bias)
        init.zeros_(self.bonus)

    def replacement(self, rate: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """a and k̃, (…, S) each."""
        rate = torch.sigmoid(rate + upcast(self.rate_bias))
        return rate, key * (1 + (rate - 1) * upcast(self.replacement_mix))

    def delta_step(self, value, decay, rate, key, query):
        log_decay = -math.exp(-0.5) * torch.sigmoid(decay + upcast(self.decay_bias))
        rate, replacement = self.replacement(rate, key)
        removal = normalized(self.by_head(key * upcast(self.removal_scale)))
        log_decay, rate, replacement = map(self.by_head, (log_decay, rate, replacement))
        return DeltaStep(log_decay, removal, rate * removal, replacement, value.unsqueeze(-2))

    def read_out(self, states, value, decay, rate, key, query):
        value, rate, key, query = map(upcast, (value, rate, key, query))
        of_state = (self.by_head(query * states)).sum(-2)
        _, replacement = self.replacement(rate, key)
        return of_state + self.by_head(query * upcast(self.bonus) * replacement).sum(-2) * value
