"""Linear recurrence h_t = a_t * h_{t-1} + b_t over a block of T steps."""

import torch
from torch import Tensor


def linear_scan_reference(
    a: Tensor, b: Tensor, initial_state: Tensor | None = None, reset_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence as a loop over time under autograd: a, b (B,T,S) -> h (B,T,S), final state (B,S)."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    accumulate = torch.promote_types(dtype, torch.float32)
    if initial_state is None:
        state = torch.zeros(a.shape[0], a.shape[2], dtype=accumulate, device=a.device)
    else:
        state = initial_state.to(accumulate)
    outputs = []
    for t in range(a.shape[1]):
        if reset_mask is not None:
            state = state.masked_fill(reset_mask[:, t, None], 0)
        state = a[:, t].to(accumulate) * state + b[:, t].to(accumulate)
        outputs.append(state)
    return torch.stack(outputs, dim=1).to(dtype), state


def available_backends() -> tuple[str, ...]:
    """Names that `linear_scan(backend=...)` accepts here."""
    return ("reference",)


def linear_scan(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    reset_mask: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h_t = a_t * h_{t-1} + b_t; a, b (B,T,S), initial_state (B,S), reset_mask (B,T) -> h (B,T,S), final (B,S)."""
    return linear_scan_reference(a, b, initial_state, reset_mask)
