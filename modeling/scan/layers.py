"""Layers without weights around the linear scan, for models that are not ours: `kernels.kernelize` maps them.

Shape letters: B batch, T steps, C channels, N states of a channel, S state width.
"""

import torch
from torch import Tensor, nn

from ..block.recurrent_state import upcast
from .linear_scan import linear_scan


def selective_scan(
    inputs: Tensor,
    time_step: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    initial_state: Tensor | None = None,
    reset_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(Δ_t a) ∘ h_{t-1} + Δ_t b_t x_t, y_t = c_t · h_t, of Mamba (Gu and Dao 2024, section 3), as one scan.

    x and Δ are (B,T,C), a (C,N), b and c (B,T,N), the initial state (B,C,N). Returns y (B,T,C) and the final state.
    """
    decay = torch.exp(time_step.unsqueeze(-1) * a)
    added = (time_step * inputs).unsqueeze(-1) * b.unsqueeze(2)
    initial_state = None if initial_state is None else initial_state.flatten(1)
    states, final_state = linear_scan(decay.flatten(2), added.flatten(2), initial_state, reset_mask)
    outputs = torch.matmul(states.unflatten(2, a.shape), c.unsqueeze(-1)).squeeze(-1)
    return outputs, final_state.unflatten(1, a.shape)


class LinearScan(nn.Module):
    """h_t = a_t ∘ h_{t-1} + b_t: a, b (B,T,S) and a state (B,S) or None -> h (B,T,S), final state (B,S)."""

    has_backward = True
    can_torch_compile = True

    def forward(self, a: Tensor, b: Tensor, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return linear_scan(a, b, initial_state)


class SelectiveScan(nn.Module):
    """The function `selective_scan_fn` of the package mamba-ssm, with the arguments that transformers gives it.

    Sums are in float32 or wider; memory is proportional to B·T·C·N.
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **kwargs,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x, dt, z (B,C,T), A (C,N), B, C (B,N,T), D, delta_bias (C) -> y (B,C,T) and, on request, state (B,C,N)."""
        inputs, time_step = upcast(hidden_states), upcast(dt)
        if delta_bias is not None:
            time_step = time_step + upcast(delta_bias).unsqueeze(-1)
        if delta_softplus:
            time_step = nn.functional.softplus(time_step)
        outputs, state = selective_scan(inputs.mT, time_step.mT, upcast(A), upcast(B).mT, upcast(C).mT)
        outputs = outputs.mT
        if D is not None:
            outputs = outputs + upcast(D).unsqueeze(-1) * inputs
        if z is not None:
            outputs = outputs * nn.functional.silu(upcast(z))
        outputs = outputs.to(hidden_states.dtype)
        return (outputs, state) if return_last_state else outputs
