"""SnAp-1: gradients of a unit that mixes channels as if each channel depended on its own past only.

Only the diagonal D_t of the Jacobian ∂h_t/∂h_{t-1} is kept (Menick et al. 2021, with one step), so each weight has one
sensitivity, to the channel that it drives:  S_t = D_t ∘ S_{t-1} + ∂h_t/∂θ  with h_{t-1} held fixed. This is the exact
sensitivity of the element-wise recurrence

    h_t = combine(h̄_{t-1}, W x_t, U h̄_{t-1}) + D̄_t ∘ (h_{t-1} - h̄_{t-1}),    bars: constants,

which has the same values as the true one. RTRL of this recurrence is therefore SnAp-1.

Shape letters: B streams or batch, T steps, S state width.
"""

from collections.abc import Callable

import torch

from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.modeling.scan.linear_scan import linear_scan
from hf_recurrent.modeling.units.dense_units import DenseUnit


def diagonal_recurrence(unit: DenseUnit, *, temporal: bool = True) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A replacement for `unit.recur` with the same states, and gradients by the diagonal of the Jacobian.

    Args:
        unit: a unit that mixes channels.
        temporal: False cuts all gradients through the previous state, also of the maps of the state.
    """
    recur = unit.recur

    def diagonal(projections, state, reset_mask=None, padding_mask=None):
        with torch.no_grad():
            states, final_state = recur(projections, state, reset_mask, padding_mask)
        before = states_before(states, state, reset_mask)
        projections = [upcast(projection) for projection in projections]
        with torch.set_grad_enabled(temporal and torch.is_grad_enabled()):
            of_state = [upcast(state_map(before)) for state_map in unit.state_maps]
        combined = unit.combine(before, *projections, *of_state)
        change = combined - combined.detach()
        if padding_mask is not None:
            change = change.masked_fill(padding_mask.unsqueeze(-1), 0)
        if not temporal:
            return states + change, final_state
        decay = _diagonal_of_jacobian(unit, before, projections, of_state)
        if padding_mask is not None:
            decay = decay.masked_fill(padding_mask.unsqueeze(-1), 1)
        changes, final_change = linear_scan(decay, change, state - state.detach(), reset_mask)
        return states + changes, final_state + final_change

    return diagonal


def states_before(states: torch.Tensor, state: torch.Tensor, reset_mask: torch.Tensor | None) -> torch.Tensor:
    """State before each step, (B, T, S), detached; from `states` (B, T, S) and the initial `state` (B, S)."""
    before = torch.cat([state.detach().unsqueeze(1), states[:, :-1].detach()], 1)
    return before if reset_mask is None else before.masked_fill(reset_mask.unsqueeze(-1), 0)


def _diagonal_of_jacobian(unit, before, projections, of_state) -> torch.Tensor:
    """D_t of all steps, (B, T, S): the direct part, plus the part through each map's diagonal weight."""
    with torch.enable_grad():
        parts = [tensor.detach().requires_grad_() for tensor in (before, *of_state)]
        combined = unit.combine(parts[0], *(projection.detach() for projection in projections), *parts[1:])
        itself, *through = torch.autograd.grad(combined.sum(), parts, allow_unused=True, materialize_grads=True)
    diagonals = [upcast(state_map.weight.detach().diagonal()) for state_map in unit.state_maps]
    return itself + sum(gradient * weights for gradient, weights in zip(through, diagonals, strict=True))
