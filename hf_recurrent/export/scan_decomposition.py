"""The linear scan in plain tensor operations, for exported programs, which cannot call this package's kernels.

Shape letters: B streams, T steps, S state width.
"""

import torch
from torch import Tensor

# log2 of the longest block: the number of rounds is part of the program, T is not.
_ROUNDS = 16
LONGEST_BLOCK = 1 << _ROUNDS


def scan_by_doubling(
    a: Tensor, b: Tensor, initial_state: Tensor, reset_mask: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """h_t = a_t ∘ h_{t-1} + b_t by recursive doubling (Hillis and Steele 1986), for T up to [`LONGEST_BLOCK`].

    Multiplications and additions only, so that decays of zero and of either sign are exact.

    Args:
        a, b: (B, T, S) of one type.
        initial_state: (B, S), of the same type or wider.
        reset_mask: (B, T) bool, or None.
        backend: ignored.

    Returns:
        h (B, T, S) in the type of `a`, and the final state (B, S) in the type of `initial_state`.
    """
    decay, value = a.to(initial_state.dtype), b.to(initial_state.dtype)
    if reset_mask is not None:
        decay = decay.masked_fill(reset_mask.unsqueeze(-1), 0)
    steps = a.shape[1]
    for number in range(_ROUNDS):
        before = (0, 0, 1 << number, 0)
        value = value + decay * torch.constant_pad_nd(value, before)[:, :steps]
        decay = decay * torch.constant_pad_nd(decay, before, 1)[:, :steps]
    states = value + decay * initial_state.unsqueeze(1)
    return states.to(a.dtype), states[:, -1].clone()
