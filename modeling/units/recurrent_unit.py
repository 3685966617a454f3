"""Base classes of the recurrent units: projections of the block's input and one element-wise step.

`coefficients` is the only definition of a step that is linear in the state: the parallel scan, a single step and the
sensitivities of real-time recurrent learning use it.

Shape letters: B streams or batch, T steps, S state width, N layers, G channel groups.
"""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..block.linear_maps import linear_maps
from ..scan.linear_scan import linear_scan

RING_RADIUS = (0.9, 0.999)
SMALLEST_SQUARED_GAMMA = 1e-12


def input_normalizer(log_decay: Tensor) -> Tensor:
    """γ = sqrt(1 - r²) from log r, exact where r → 1 and with a finite gradient where r = 1."""
    return torch.sqrt(torch.clamp(-torch.expm1(2 * log_decay), min=SMALLEST_SQUARED_GAMMA))


def sample_ring_rate(like: Tensor) -> Tensor:
    """-log r for radii r uniform on the ring between 0.9 and 0.999 (Orvieto et al. 2023, Lemma 3.2)."""
    r_min, r_max = RING_RADIUS
    u = torch.rand(like.shape, dtype=torch.float32, device=like.device)
    return -0.5 * torch.log(u * (r_max**2 - r_min**2) + r_min**2)


def lecun_std(fan_in: int) -> float:
    """Standard deviation of LeCun's normal initialisation."""
    return 1 / math.sqrt(fan_in)


def copy_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Initialise a parameter, unless it was loaded; a sharded one (FSDP) with the values of the first process."""
    if hasattr(parameter, "device_mesh") and not hasattr(values, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    init.copy_(parameter, values)


def copy_log(parameter: nn.Parameter, values: Tensor) -> None:
    """Initialise a parameter with the logarithm of positive values."""
    copy_values(parameter, torch.log(values))


class RecurrentUnit(nn.Module):
    """Base class of the units with h_t = a_t ∘ h_{t-1} + b_t; a step of another form overrides `recur`.

    Args:
        input_size: width of the unit's input.
        state_size: S, real numbers in the state. The output has as many, divided by `state_per_output`.
        layer_index: number of the unit's layer, from 0.
        num_layers: N, layers of the model.
        bias: the maps of the input have biases, which start at zero.
        allow_negative_eigenvalues: a = 2 r - 1 instead of the published a = r ≥ 0, so that a unit can count
            modulo two (Grazzi et al. 2024).

    Raises:
        ValueError: the unit does not support these sizes or negative eigenvalues.
    """

    # Names of the linear maps of the input, to `channel_groups` numbers each, to `output_size` numbers each, and to S
    # numbers each. `coefficients` gets their results in this order.
    channel_maps: tuple[str, ...] = ()
    input_maps: tuple[str, ...] = ()
    wide_maps: tuple[str, ...] = ()
    # Names of the unit's own parameters with one number for each group of channels.
    vectors: tuple[str, ...] = ()
    has_real_eigenvalues = True
    # Why `allow_negative_eigenvalues` is refused, after the name of the class; None where it is supported.
    negative_refusal: str | None = None
    # Numbers of state for each number of the output: state_size must be a multiple of it.
    state_per_output = 1

    def __init__(
        self,
        input_size: int,
        state_size: int,
        *,
        layer_index: int = 0,
        num_layers: int = 1,
        bias: bool = False,
        allow_negative_eigenvalues: bool = False,
    ):
        super().__init__()
        if allow_negative_eigenvalues and self.negative_refusal is not None:
            raise ValueError(
                f"`allow_negative_eigenvalues` is True, but {type(self).__name__} {self.negative_refusal}."
            )
        if state_size % self.state_per_channel:
            raise ValueError(
                f"`state_size` is {state_size}; {type(self).__name__} needs a multiple of "
                f"{self.state_per_channel}, the numbers of state of each channel."
            )
        self.input_size = input_size
        self.state_size = state_size
        self.output_size = state_size // self.state_per_output
        self.layer_index = layer_index
        self.num_layers = num_layers
        self.bias = bias
        self.allow_negative_eigenvalues = allow_negative_eigenvalues
        for name in self.channel_maps:
            setattr(self, name, self.input_map(self.channel_groups))
        for name in self.input_maps:
            setattr(self, name, self.input_map(self.output_size))
        for name in self.vectors:
            setattr(self, name, nn.Parameter(torch.empty(self.channel_groups)))
        for name in self.wide_maps:
            setattr(self, name, self.input_map())

    def input_map(self, width: int | None = None) -> nn.Linear:
        """A linear map of the unit's input, to S numbers by default."""
        return nn.Linear(self.input_size, self.state_size if width is None else width, bias=self.bias)

    @property
    def no_weight_decay(self) -> list[str]:
        """The unit's own vectors (rates, phases, bounds), for which zero is not a neutral value."""
        return [name for name, _ in self.named_parameters(recurse=False)]

    @property
    def state_per_channel(self) -> int:
        """Numbers of state in a group of channels."""
        return self.state_per_output

    @property
    def channel_groups(self) -> int:
        """G, the number of independent groups of channels.

        Channel c of the state, of a projection or of a vector belongs to group c mod G: with G = S every channel is
        independent, with G = S/2 each pair of real and imaginary part. This makes real-time recurrent learning exact
        and cheap.
        """
        return self.state_size // self.state_per_channel

    def project(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """The linear maps of the input, (B, T, input_size) → each (B, T, …), by default `input_projection` alone."""
        names = (*self.channel_maps, *self.input_maps, *self.wide_maps) or ("input_projection",)
        return linear_maps(inputs, *(getattr(self, name) for name in names))

    def coefficients(self, *projections: Tensor) -> tuple[Tensor, Tensor]:
        """Element-wise (a, b) of the step from the projections, with T or without it, float32 or wider."""
        raise NotImplementedError

    def read_out(self, states: Tensor, *projections: Tensor) -> Tensor:
        """The unit's output (B, T, `output_size`) from the states of the same steps, (B, T, S)."""
        return states

    def to_scan(self, state: Tensor) -> Tensor:
        """The carried state, (…, S) real numbers, in the form of the step."""
        return state

    def from_scan(self, state: Tensor) -> Tensor:
        """The inverse of `to_scan`."""
        return state

    def reset_parameters(self) -> None:
        """Initialise the parameters outside of linear maps as in the unit's source."""

    def sample_rate(self, like: Tensor) -> Tensor:
        """-log r at initialisation: |a| on the ring, with alternating signs where eigenvalues may be negative."""
        rate = sample_ring_rate(like)
        if not self.allow_negative_eigenvalues:
            return rate
        sign = 1 - 2 * (torch.arange(rate.numel(), device=rate.device) % 2)
        return -torch.log((1 + sign * torch.exp(-rate)) / 2)

    def decay_and_normalizer(self, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        """a and γ = sqrt(1 - a²) from log r, exact where |a| → 1."""
        decay = torch.exp(log_decay)
        if not self.allow_negative_eigenvalues:
            return decay, input_normalizer(log_decay)
        rest = -torch.expm1(log_decay)
        return decay - rest, 2 * torch.sqrt(torch.clamp(decay * rest, min=SMALLEST_SQUARED_GAMMA))

    def forward(
        self, inputs: Tensor, state: Tensor, reset_mask: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run a block.

        Args:
            inputs: (B, T, input_size).
            state: (B, S), the state before the block.
            reset_mask: (B, T) bool, true where the state before a step is zero.
            padding_mask: (B, T) bool, true where a step leaves the state as it was.

        Returns:
            The outputs of all steps, (B, T, `output_size`), and the last state, (B, S).
        """
        projections = self.project(inputs)
        states, final_state = self.recur(projections, state, reset_mask, padding_mask)
        return self.read_out(states, *projections), final_state

    def recur(
        self,
        projections: tuple[Tensor, ...],
        state: Tensor,
        reset_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The states of all steps, (B, T, S), and the last one, (B, S), from the projections of a block."""
        a, b = self.coefficients(*projections)
        a = a.expand(b.shape)
        if padding_mask is not None:
            a = a.masked_fill(padding_mask.unsqueeze(-1), 1)
            b = b.masked_fill(padding_mask.unsqueeze(-1), 0)
        states, final_state = linear_scan(a, b, self.to_scan(state), reset_mask)
        return self.from_scan(states), self.from_scan(final_state)


class ComplexRecurrentUnit(RecurrentUnit):
    """Base class of the units with complex eigenvalues λ = r (cos θ + i sin θ).

    The S real numbers of state and output are the real parts of S/2 complex channels and then their imaginary parts,
    so that Re(C h) of any complex C is a real linear map of the output (Memora, appendix G.4).

    Where `conjugate_pairs` is set, the second half of the channels has the conjugate eigenvalues of the first
    (Memora, appendix G.5); inputs and outputs of the two halves stay free.

    Raises:
        ValueError: S is odd, or not a multiple of four where eigenvalues come in conjugate pairs.
    """

    has_real_eigenvalues = False
    negative_refusal = "has complex eigenvalues"
    conjugate_pairs = False

    @property
    def state_per_channel(self) -> int:
        return max(self.state_per_output, 4 if self.conjugate_pairs else 2)

    def eigenvalue(self, radius: Tensor, phase: Tensor) -> Tensor:
        """λ of all S/2 channels from radius and phase of the free ones, (…, free) → complex (…, S/2)."""
        real, imaginary = radius * torch.cos(phase), radius * torch.sin(phase)
        if self.conjugate_pairs:
            real, imaginary = torch.cat([real, real], -1), torch.cat([imaginary, -imaginary], -1)
        return torch.complex(real, imaginary)

    def of_all_channels(self, per_free_channel: Tensor) -> Tensor:
        """A real number for each of the S/2 channels, from one for each free channel."""
        return torch.cat([per_free_channel] * 2, -1) if self.conjugate_pairs else per_free_channel

    def sample_phase(self, like: Tensor) -> Tensor:
        """Phases uniform on the circle, or on its upper half where the lower one is implied."""
        return torch.rand(like.shape, device=like.device) * (math.pi if self.conjugate_pairs else 2 * math.pi)

    def to_scan(self, state: Tensor) -> Tensor:
        return torch.complex(*state.chunk(2, -1))

    def from_scan(self, state: Tensor) -> Tensor:
        return torch.cat([state.real, state.imag], -1)


class StateMap(nn.Linear):
    """A dense map of the S numbers of a unit's state to S numbers."""

    def __init__(self, state_size: int, bias: bool = False):
        super().__init__(state_size, state_size, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states.to(self.weight.dtype))


class DenseReadOut(RecurrentUnit):
    """For a unit whose output is y_t = C h_t, or Re(C h_t) of a complex state, with a dense C."""

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        self.state_read_out = StateMap(state_size)

    def read_out(self, states, *projections):
        return self.state_read_out(states)
