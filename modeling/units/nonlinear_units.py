"""Recurrent units whose element-wise step is not linear in the state: sequential steps, no parallel scan.

Shape letters: B streams or batch, S state width.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..block.recurrent_state import upcast
from .recurrent_unit import RecurrentUnit, StateMap, copy_values, sample_ring_rate


class SequentialUnit(RecurrentUnit):
    """Base class of the units with h_t = step(h_{t-1}, projections), computed sequentially."""

    negative_refusal = "has no decay: its recurrent weights have either sign already"

    def step(self, state: Tensor, *projections: Tensor) -> Tensor:
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


def reset_uniformly(unit: RecurrentUnit) -> None:
    """Initialise the vectors from [-1, 1]."""
    for name in unit.vectors:
        init.uniform_(getattr(unit, name), -1.0, 1.0)


class IndRNN(SequentialUnit):
    """Independently recurrent unit (Li et al. 2018, equation 2).

    h_t = tanh(W x_t + u ∘ h_{t-1}).

    The published non-linearity is ReLU, with |u| clipped by the known length of the sequences; streams are endless, so
    it is tanh here, and the states stay bounded for every u. u starts on the linear units' ring.
    """

    input_maps = ("input_projection",)
    vectors = ("recurrent_weight",)

    def reset_parameters(self) -> None:
        copy_values(self.recurrent_weight, torch.exp(-sample_ring_rate(self.recurrent_weight)))

    def step(self, state, projection):
        recurrent_weight = upcast(self.recurrent_weight)
        return torch.tanh(projection + recurrent_weight * state)


class SRU(SequentialUnit):
    """Simple recurrent unit (Lei et al. 2018, equations 1 to 4).

    f = σ(W_f x + v_f ∘ c_{t-1}),  c_t = f ∘ c_{t-1} + (1 - f) ∘ (W x),
    r = σ(W_r x + v_r ∘ c_{t-1}),  h_t = r ∘ c_t + (1 - r) ∘ x.

    The state is (c, r): r depends on the last c, so that it is a part of the step. Where input and output differ in
    width, a linear map of x takes its place in h, as in the paper.
    """

    input_maps = ("candidate", "forget_gate", "reset_gate")
    vectors = ("forget_weight", "reset_weight")
    reset_parameters = reset_uniformly
    state_per_output = 2

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        self.skip = nn.Identity() if input_size == self.output_size else self.input_map(self.output_size)

    def project(self, inputs):
        return *super().project(inputs), self.skip(inputs)

    def step(self, state, candidate, forget_gate, reset_gate, skip):
        forget_weight, reset_weight = map(upcast, (self.forget_weight, self.reset_weight))
        cell, _ = state.chunk(2, -1)
        forget = torch.sigmoid(forget_gate + forget_weight * cell)
        reset = torch.sigmoid(reset_gate + reset_weight * cell)
        return torch.cat([candidate + forget * (cell - candidate), reset], -1)

    def read_out(self, states, candidate, forget_gate, reset_gate, skip):
        cell, reset = states.chunk(2, -1)
        skip = upcast(skip)
        return skip + reset * (cell - skip)


class ELSTM(SequentialUnit):
    """Element-wise long short-term memory (Irie et al. 2024, equations 5 to 8).

    f = σ(F x + w_f ∘ c_{t-1}),  z = tanh(Z x + w_z ∘ c_{t-1}),  c_t = f ∘ c_{t-1} + (1 - f) ∘ z,
    o = σ(O x + W c_t),  h_t = o ∘ c_t; c is the state, W is dense and reads it after the step.
    """

    input_maps = ("forget_gate", "candidate", "output_gate")
    vectors = ("forget_weight", "candidate_weight")
    reset_parameters = reset_uniformly

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        self.state_read_out = StateMap(state_size)

    def step(self, state, forget_gate, candidate, output_gate):
        forget_weight, candidate_weight = map(upcast, (self.forget_weight, self.candidate_weight))
        forget = torch.sigmoid(forget_gate + forget_weight * state)
        proposed = torch.tanh(candidate + candidate_weight * state)
        return proposed + forget * (state - proposed)

    def read_out(self, states, forget_gate, candidate, output_gate):
        return torch.sigmoid(upcast(output_gate) + upcast(self.state_read_out(states))) * states


class SLSTM(SequentialUnit):
    """Long short-term memory with exponential gates, heads of one cell (Beck et al. 2024, section 2.2).

    z = tanh(W_z x + r_z ∘ h_{t-1}),  i = exp(W_i x + r_i ∘ h_{t-1}),  f and o: σ of such sums,
    c_t = f ∘ c_{t-1} + i ∘ z,  n_t = f ∘ n_{t-1} + i,  h_t = o ∘ c_t / n_t.

    The recurrent maps are dense inside a head; with one cell each they are the vectors r. The state is
    (c e^-m, n e^-m, m, h) with the stabiliser m_t = max(log f + m_{t-1}, log i), on which h does not depend.
    """

    input_maps = ("candidate", "input_gate", "forget_gate", "output_gate")
    vectors = ("candidate_weight", "input_weight", "forget_weight", "output_weight")
    reset_parameters = reset_uniformly
    state_per_output = 4

    def step(self, state, candidate, input_gate, forget_gate, output_gate):
        weights = (self.candidate_weight, self.input_weight, self.forget_weight, self.output_weight)
        of_candidate, of_input, of_forget, of_output = map(upcast, weights)
        cell, normalizer, stabilizer, hidden = state.chunk(4, -1)
        log_input = input_gate + of_input * hidden
        log_forget = -nn.functional.softplus(-(forget_gate + of_forget * hidden))
        # After a reset there is nothing to keep, and nothing to compare the first input with.
        log_kept = torch.where(normalizer > 0, log_forget + stabilizer, log_input)
        stabilizer = torch.maximum(log_kept, log_input)
        kept, added = torch.exp(log_kept - stabilizer), torch.exp(log_input - stabilizer)
        cell = kept * cell + added * torch.tanh(candidate + of_candidate * hidden)
        normalizer = kept * normalizer + added
        hidden = torch.sigmoid(output_gate + of_output * hidden) * cell / normalizer
        return torch.cat([cell, normalizer, stabilizer, hidden], -1)

    def read_out(self, states, *projections):
        return states.chunk(4, -1)[3]
