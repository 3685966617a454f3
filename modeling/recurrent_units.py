"""Recurrent units: the interchangeable parts of a block that carry the state.

A unit is a set of projections of the block's input and one element-wise step. `coefficients` is that step's only
definition: the parallel scan, a single step and, later, the sensitivities of real-time recurrent learning use it.

Shape letters: B streams or batch, T steps, M model width, S state width.
"""

import math

import torch
from torch import nn
from transformers import initialization as init

from .linear_scan import linear_scan
from .recurrent_state import state_dtype

RING_RADIUS = (0.9, 0.999)
SMALLEST_SQUARED_GAMMA = 1e-12


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Gates and states are computed in float32, or in float64 where the model is."""
    return tensor.to(state_dtype(tensor.dtype))


def input_normalizer(log_decay: torch.Tensor) -> torch.Tensor:
    """γ = sqrt(1 - r²) from log r, exact where r → 1 and with a finite gradient where r = 1."""
    return torch.sqrt(torch.clamp(-torch.expm1(2 * log_decay), min=SMALLEST_SQUARED_GAMMA))


def sample_ring_rate(like: torch.Tensor) -> torch.Tensor:
    """-log r for radii r uniform on the ring between 0.9 and 0.999 (Orvieto et al. 2023, Lemma 3.2)."""
    r_min, r_max = RING_RADIUS
    u = torch.rand(like.shape, dtype=torch.float32, device=like.device)
    return -0.5 * torch.log(u * (r_max**2 - r_min**2) + r_min**2)


class RecurrentUnit(nn.Module):
    """Base class of the units whose step is linear in the state: h_t = a_t ∘ h_{t-1} + b_t.

    Args:
        input_size: width of the unit's input.
        state_size: S, width of the state and of the output.
    """

    def __init__(self, input_size: int, state_size: int):
        super().__init__()
        self.input_size = input_size
        self.state_size = state_size

    def project(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The linear maps of the input, (B, T, input_size) → each (B, T, S)."""
        raise NotImplementedError

    def coefficients(self, *projections: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Element-wise (a, b) of the step from the projections, all (B, T, S) or (B, S), float32 or wider."""
        raise NotImplementedError

    def reset_vectors(self) -> None:
        """Initialise the parameters that are no linear map, as the unit's source does."""

    def forward(
        self,
        inputs: torch.Tensor,
        state: torch.Tensor,
        reset_mask: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a block.

        Args:
            inputs: (B, T, input_size).
            state: (B, S), the state before the block.
            reset_mask: (B, T) bool, true where the state before a step is zero.
            padding_mask: (B, T) bool, true where a step leaves the state as it was.

        Returns:
            The states of all steps, (B, T, S), and the last one, (B, S).
        """
        a, b = self.coefficients(*self.project(inputs))
        if padding_mask is not None:
            a = a.masked_fill(padding_mask.unsqueeze(-1), 1)
            b = b.masked_fill(padding_mask.unsqueeze(-1), 0)
        return linear_scan(a, b, state, reset_mask)


class GLRU(RecurrentUnit):
    """Gated linear recurrent unit (Memora, section 3).

    r = exp(-3 e^ν ∘ σ(R u)),  γ = sqrt(1 - r²),  h_t = r ∘ h_{t-1} + γ ∘ (G u) ∘ (B u).

    `recurrence_gate` is R, `input_gate` is G (linear, without a sigmoid), `input_projection` is B.
    """

    decay_scale = 3.0

    def __init__(self, input_size: int, state_size: int):
        super().__init__(input_size, state_size)
        self.recurrence_gate = nn.Linear(input_size, state_size, bias=False)
        self.input_gate = nn.Linear(input_size, state_size, bias=False)
        self.input_projection = nn.Linear(input_size, state_size, bias=False)
        self.nu = nn.Parameter(torch.empty(state_size))

    def reset_vectors(self) -> None:
        init.copy_(self.nu, torch.log(sample_ring_rate(self.nu)))

    def project(self, inputs):
        return self.recurrence_gate(inputs), self.input_gate(inputs), self.input_projection(inputs)

    def coefficients(self, recurrence_gate, input_gate, projection):
        recurrence_gate, input_gate, projection = map(at_least_float32, (recurrence_gate, input_gate, projection))
        rate = self.decay_scale * torch.exp(at_least_float32(self.nu))
        log_decay = -rate * torch.sigmoid(recurrence_gate)
        return torch.exp(log_decay), input_normalizer(log_decay) * input_gate * projection


class RGLRU(RecurrentUnit):
    """Real-gated linear recurrent unit of Hawk (De et al. 2024, equations 1 to 4), with dense gates.

    r = exp(-8 softplus(Λ) ∘ σ(W_a x)),  h_t = r ∘ h_{t-1} + sqrt(1 - r²) ∘ σ(W_x x) ∘ x.

    A reset zeroes the state and nothing else. Raises a ValueError if `input_size` is not `state_size`: the unit
    gates its input channel by channel and cannot expand it.
    """

    decay_scale = 8.0

    def __init__(self, input_size: int, state_size: int):
        super().__init__(input_size, state_size)
        if input_size != state_size:
            raise ValueError(
                f"`recurrent_unit='rg_lru'` needs an input as wide as its state, but the block gives it {input_size} "
                f"channels and `state_size` is {state_size}; use it in Hawk's block, which projects first."
            )
        self.recurrence_gate = nn.Linear(input_size, state_size, bias=False)
        self.input_gate = nn.Linear(input_size, state_size, bias=False)
        self.recurrent_param = nn.Parameter(torch.empty(state_size))

    def reset_vectors(self) -> None:
        # The inverse of softplus, so that softplus(Λ) is the sampled rate.
        init.copy_(self.recurrent_param, torch.log(torch.expm1(sample_ring_rate(self.recurrent_param))))

    def project(self, inputs):
        return self.recurrence_gate(inputs), self.input_gate(inputs), inputs

    def coefficients(self, recurrence_gate, input_gate, inputs):
        recurrence_gate, input_gate, inputs = map(at_least_float32, (recurrence_gate, input_gate, inputs))
        rate = self.decay_scale * nn.functional.softplus(at_least_float32(self.recurrent_param))
        log_decay = -rate * torch.sigmoid(recurrence_gate)
        return torch.exp(log_decay), input_normalizer(log_decay) * torch.sigmoid(input_gate) * inputs


RECURRENT_UNITS: dict[str, type[RecurrentUnit]] = {"glru": GLRU, "rg_lru": RGLRU}


def build_recurrent_unit(name: str, input_size: int, state_size: int) -> RecurrentUnit:
    """The unit of that name; a ValueError names the allowed ones."""
    if name not in RECURRENT_UNITS:
        raise ValueError(f"`recurrent_unit` is {name!r}; it must be one of {sorted(RECURRENT_UNITS)}.")
    return RECURRENT_UNITS[name](input_size, state_size)


def lecun_std(fan_in: int) -> float:
    """Standard deviation of LeCun's normal initialisation."""
    return 1 / math.sqrt(fan_in)
