"""Recurrent units whose recurrence mixes channels: the baselines of element-wise recurrence in online learning.

Their steps are sequential. Exact real-time recurrent learning needs a number for every weight and channel; the rule
`snap1` keeps one for every weight (Menick et al. 2021).

Shape letters: B streams or batch, T steps, S state width.
"""

import torch
from torch import Tensor

from ..block.recurrent_state import upcast
from .nonlinear_units import SequentialUnit
from .recurrent_unit import StateMap, copy_values


class DenseUnit(SequentialUnit):
    """Base class of the units that mix channels by linear maps of the last state only.

    h_t = combine(h_{t-1}, maps of the input, maps of h_{t-1}), where `combine` is element-wise in all of them.
    """

    def state_map(self, bias: bool = False) -> StateMap:
        """A linear map of the state."""
        return StateMap(self.state_size, bias)

    @property
    def state_maps(self) -> tuple[StateMap, ...]:
        """The maps of the last state, in the order of `combine`'s arguments."""
        raise NotImplementedError

    def combine(self, state: Tensor, *projections: Tensor) -> Tensor:
        """The next state from the last one, the maps of the input and the maps of the state, (B, T, S) each."""
        raise NotImplementedError

    def step(self, state, *projections):
        of_state = [upcast(state_map(state)) for state_map in self.state_maps]
        return self.combine(state, *projections, *of_state)


class GRU(DenseUnit):
    """Gated recurrent unit (Cho et al. 2014), in the form of cuDNN, torch and flax.

    r = σ(W_r x + U_r h),  z = σ(W_z x + U_z h),  n = tanh(W_n x + r ∘ (U_n h)),  h ← (1 - z) ∘ n + z ∘ h.

    With biases, each W has one, and so has U_n, since its output is multiplied by r.
    """

    input_maps = ("reset_gate", "update_gate", "candidate")

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        self.recurrent_reset_gate = self.state_map()
        self.recurrent_update_gate = self.state_map()
        self.recurrent_candidate = self.state_map(self.bias)

    @property
    def state_maps(self):
        return self.recurrent_reset_gate, self.recurrent_update_gate, self.recurrent_candidate

    def combine(self, state, reset, update, candidate, recurrent_reset, recurrent_update, recurrent_candidate):
        reset_gate = torch.sigmoid(reset + recurrent_reset)
        update_gate = torch.sigmoid(update + recurrent_update)
        proposed = torch.tanh(candidate + reset_gate * recurrent_candidate)
        return proposed + update_gate * (state - proposed)


class DenseLinear(DenseUnit):
    """Linear recurrent network with a dense recurrence (Zucchet et al. 2023, section 4.2).

    h_t = A h_{t-1} + B x_t.

    A is unbounded. It starts as a rotation times 0.88, the limit of the spectral radius of the paper's initial normal
    distribution, truncated at two standard deviations: at first no state explodes.
    """

    input_maps = ("input_projection",)
    initial_radius = 0.88

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        self.recurrent_map = self.state_map()

    def reset_parameters(self) -> None:
        weight = self.recurrent_map.weight
        rotation, _ = torch.linalg.qr(torch.randn(weight.shape, dtype=torch.float32, device=weight.device))
        copy_values(weight, self.initial_radius * rotation)

    @property
    def state_maps(self):
        return (self.recurrent_map,)

    def combine(self, state, projection, recurrent):
        return projection + recurrent
