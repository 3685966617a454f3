"""Recurrent units whose element-wise step is not linear in the state: sequential steps, no parallel scan.

Shape letters: B streams or batch, S state width.
"""

import torch
from torch import nn

from .parameter_values import copy_values
from .recurrent_state import upcast
from .recurrent_unit import RecurrentUnit, sample_ring_rate


class SequentialUnit(RecurrentUnit):
    """Base class of the units with h_t = step(h_{t-1}, projections), computed sequentially.

    Raises:
        ValueError: `allow_negative_eigenvalues` is set; it applies to positive decays only.
    """

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        if self.allow_negative_eigenvalues:
            raise ValueError(
                f"`allow_negative_eigenvalues` is True, but {type(self).__name__} has no decay: its recurrent weights "
                "have either sign already."
            )

    def step(self, state: torch.Tensor, *projections: torch.Tensor) -> torch.Tensor:
        """The next state, (B, 1, S), from the last one and one step's projections, all float32 or wider."""
        raise NotImplementedError

    def recur(self, projections, state, reset_mask=None, padding_mask=None):
        steps = zip(*(projection.split(1, 1) for projection in map(upcast, projections)), strict=True)
        state, states = state.unsqueeze(1), []
        for t, projected in enumerate(steps):
            if reset_mask is not None:
                state = state.masked_fill(reset_mask[:, t, None, None], 0)
            new_state = self.step(state, *projected)
            if padding_mask is not None:
                new_state = torch.where(padding_mask[:, t, None, None], state, new_state)
            state = new_state
            states.append(state)
        return torch.cat(states, 1), state.squeeze(1)


class IndRNN(SequentialUnit):
    """Independently recurrent unit (Li et al. 2018, equation 2).

    h_t = tanh(W x_t + u ∘ h_{t-1}).

    The published non-linearity is ReLU, with |u| clipped by the known length of the sequences; streams are endless, so
    it is tanh here, and the states stay bounded for every u. u starts on the linear units' ring.
    """

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        self.input_projection = self.input_map()
        self.recurrent_weight = nn.Parameter(torch.empty(state_size))

    def reset_parameters(self) -> None:
        copy_values(self.recurrent_weight, torch.exp(-sample_ring_rate(self.recurrent_weight)))

    def step(self, state, projection):
        recurrent_weight = upcast(self.recurrent_weight)
        return torch.tanh(projection + recurrent_weight * state)
