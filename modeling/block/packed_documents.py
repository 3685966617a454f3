"""Documents packed into one row, as the collators of other libraries mark them: their starts are resets of the state.

Shape letters: B streams or batch, T steps.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .tensor_checks import check_tensor, has_values

PACKING_ARGUMENTS = ("position_ids", "seq_idx", "cu_seq_lens_q")
# Other arguments of stock models that do not change what a recurrent model computes, and those of `generate`, which
# passes the tokenizer of its stop strings on to `forward`.
_WITHOUT_EFFECT = {"cache_position", "cu_seq_lens_k", "max_length_q", "max_length_k", "tokenizer"}
_ATTENTION = {"output_attentions", "cache", "past_key_values"}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise a TypeError for an argument that would be ignored and that asks for something; None never does."""
    for name, value in arguments.items():
        if value is None or name in _WITHOUT_EFFECT or name in PACKING_ARGUMENTS or (name in _ATTENTION and not value):
            continue
        hint = "; a recurrent model has no attention" if name in _ATTENTION else ""
        raise TypeError(f"forward() got an unexpected keyword argument '{name}'{hint}.")


def packed_resets(
    reset_mask: torch.Tensor | None,
    real: torch.Tensor | None,
    shape: tuple[int, int],
    *,
    position_ids: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The resets (B, T) of packed documents, or None if nothing marks a document.

    Args:
        reset_mask: (B, T) bool, the caller's own resets.
        real: (B, T) bool, false where a step is padding, whose marks do not count.
        shape: B and T.
        position_ids: (B, T) or (1, T), the position in the document: 0 at its first step.
        seq_idx: (B, T) or (1, T), the number of the document.
        cu_seq_lens_q: (documents + 1,), the first step of every document, counted over all rows, and B · T.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: a shape or type does not match, positions do not count up, or two arguments disagree, except at the
            first step of a block, which may continue a document for one of them.
    """
    found = {} if reset_mask is None else {"reset_mask": reset_mask}
    if position_ids is not None:
        position_ids = _of_shape("position_ids", position_ids, shape)
        found["position_ids"] = position_ids == 0
        _check_positions(position_ids, real)
    if seq_idx is not None:
        seq_idx = _of_shape("seq_idx", seq_idx, shape)
        found["seq_idx"] = torch.nn.functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    if cu_seq_lens_q is not None:
        found["cu_seq_lens_q"] = _starts(cu_seq_lens_q, shape)
    if not found:
        return None
    (name, resets), *others = found.items()
    for other, mask in others:
        _check_agreement(name, resets, other, mask, real)
        resets = resets | mask
    return resets


def _of_shape(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    check_tensor(name, tensor)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() != 2:
        raise ValueError(f"`{name}` is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be integers, (B, T).")
    if tensor.shape not in (shape, (1, shape[1])):
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}; the inputs need {tuple(shape)}.")
    return tensor.expand(shape)


def _starts(ends: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    check_tensor("cu_seq_lens_q", ends)
    batch_size, steps = shape
    if ends.dim() != 1 or ends.is_floating_point() or ends.is_complex():
        raise ValueError(
            f"`cu_seq_lens_q` is {ends.dtype} of shape {tuple(ends.shape)}; it must be integers in one dimension."
        )
    if has_values(ends):
        places = ends.tolist()
        if places[:1] != [0] or places[-1] != batch_size * steps or places != sorted(places):
            raise ValueError(f"`cu_seq_lens_q` must rise from 0 to {batch_size * steps}, the number of all steps.")
        if missing := sorted({row * steps for row in range(batch_size)} - {*places}):
            raise ValueError(
                f"`cu_seq_lens_q` has a document that goes from row {missing[0] // steps - 1} to the next."
            )
    starts = torch.zeros(batch_size * steps + 1, dtype=torch.bool, device=ends.device)
    return starts.scatter(0, ends.long(), True)[:-1].view(shape)


def _check_positions(position_ids: torch.Tensor, real: torch.Tensor | None) -> None:
    if not (position_ids.is_cpu and has_values(position_ids)):
        return
    before, after = position_ids[:, :-1], position_ids[:, 1:]
    wrong = (after != 0) & (after != before + 1)
    if real is not None:
        wrong &= real[:, :-1] & real[:, 1:]
    if wrong.any():
        row, step = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"`position_ids` goes from {int(before[row, step])} to {int(after[row, step])} in row {row}, step "
            f"{step + 1}; a position must be 0 or follow the one before."
        )


def _check_agreement(
    name: str, resets: torch.Tensor, other: str, mask: torch.Tensor, real: torch.Tensor | None
) -> None:
    if not (resets.is_cpu and has_values(resets)):
        return
    differs = (resets != mask)[:, 1:]
    if real is not None:
        differs &= real[:, 1:]
    if differs.any():
        row, step = differs.nonzero()[0].tolist()
        raise ValueError(
            f"`{name}` and `{other}` disagree about a document that begins at row {row}, step {step + 1}."
        )
