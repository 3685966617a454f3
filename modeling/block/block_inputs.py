"""Masks of a block: padding, resets, and documents packed into one row, whose starts are resets.

Shape letters: B streams or batch, T steps.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .tensor_checks import check_mask, check_tensor, has_values

_PACKING = ("position_ids", "seq_idx", "cu_seq_lens_q")  # as the collators of other libraries mark documents
# Other arguments of stock models that do not change what a recurrent model computes. `generate` passes the tokenizer
# of its stop strings on to `forward`.
_WITHOUT_EFFECT = {"cache_position", "cu_seq_lens_k", "max_length_q", "max_length_k", "tokenizer"}
_ATTENTION = {"output_attentions", "cache", "past_key_values"}


class Padding:
    """Moves the real steps of each row, those with a mask (B, T) that is not 0, to its front, and the results back.

    With the padding at the end, a row's outputs and its last state are as without padding, wherever the padding was.
    """

    def __init__(self, attention_mask: Tensor):
        real = attention_mask != 0
        self.lengths = real.sum(1)
        self._order = torch.argsort(~real, dim=1, stable=True)
        self._offsets = torch.argsort(self._order, dim=1, stable=True)
        self.mask = ~real.gather(1, self._order)

    def pack(self, tensor: Tensor) -> Tensor:
        """(B, T, …) with each row's real steps first."""
        return self._gather(tensor, self._order)

    def pack_resets(self, reset_mask: Tensor | None) -> Tensor | None:
        """The resets (B, T) of packed steps; one at a step of padding has no effect."""
        return None if reset_mask is None else self.pack(reset_mask) & ~self.mask

    def unpack(self, tensor: Tensor) -> Tensor:
        """The inverse of `pack`."""
        return self._gather(tensor, self._offsets)

    @staticmethod
    def _gather(tensor: Tensor, index: Tensor) -> Tensor:
        if tensor.dim() == 3:
            index = index.unsqueeze(-1).expand(-1, -1, tensor.shape[-1])
        return tensor.gather(1, index)


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise a TypeError for an argument that would be ignored and that asks for something; None never does."""
    for name, value in arguments.items():
        if value is None or name in _WITHOUT_EFFECT or name in _PACKING or (name in _ATTENTION and not value):
            continue
        hint = "; a recurrent model has no attention" if name in _ATTENTION else ""
        raise TypeError(f"forward() got an unexpected keyword argument '{name}'{hint}.")


def read_masks(
    shape: tuple[int, int], attention_mask: Tensor | None, reset_mask: Tensor | None, arguments: Mapping[str, Any]
) -> tuple[Tensor | None, Padding | None]:
    """The resets (B, T) bool of a block and its padding; None where there are none.

    In generation, `attention_mask` is longer than T, since it covers the prompt too: the last T columns count.
    `arguments` are the others of `forward`, among them the marks of packed documents ([`packed_resets`]).

    Raises:
        TypeError: a mask is not a tensor.
        ValueError: a shape or type does not match, or a packed document goes from one row to the next.
    """
    padding = None
    if reset_mask is not None:
        reset_mask = check_mask("reset_mask", reset_mask, *shape).bool()
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask)
        mask = attention_mask[:, -shape[1] :] if attention_mask.dim() == 2 else attention_mask
        check_mask("attention_mask", mask, *shape)
        if not (has_values(mask) and bool((mask != 0).all())):
            padding = Padding(mask)
    if packing := {name: arguments[name] for name in _PACKING if arguments.get(name) is not None}:
        reset_mask = packed_resets(reset_mask, shape, **packing)
    return reset_mask, padding


def packed_resets(
    reset_mask: Tensor | None,
    shape: tuple[int, int],
    *,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor:
    """The resets (B, T) of packed documents, wherever any of these arguments marks one.

    Args:
        position_ids: (B, T) or (1, T), the position in the document: 0 at its first step.
        seq_idx: (B, T) or (1, T), the number of the document.
        cu_seq_lens_q: (documents + 1,), the first step of every document, counted over all rows, and B · T.
    """
    found = [] if reset_mask is None else [reset_mask]
    if position_ids is not None:
        found.append(_integers("position_ids", position_ids, shape) == 0)
    if seq_idx is not None:
        seq_idx = _integers("seq_idx", seq_idx, shape)
        found.append(torch.nn.functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0)))
    if cu_seq_lens_q is not None:
        found.append(_starts(cu_seq_lens_q, shape))
    return functools.reduce(torch.logical_or, found)


def _integers(name: str, tensor: Tensor, shape: tuple[int, int]) -> Tensor:
    check_tensor(name, tensor)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() != 2:
        raise ValueError(f"`{name}` is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be integers, (B, T).")
    if tensor.shape not in (shape, (1, shape[1])):
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}; the inputs need {tuple(shape)}.")
    return tensor.expand(shape)


def _starts(offsets: Tensor, shape: tuple[int, int]) -> Tensor:
    check_tensor("cu_seq_lens_q", offsets)
    batch_size, steps = shape
    if offsets.dim() != 1 or offsets.is_floating_point() or offsets.is_complex():
        raise ValueError(
            f"`cu_seq_lens_q` is {offsets.dtype}, shape {tuple(offsets.shape)}; it must be integers (documents + 1,)."
        )
    if has_values(offsets):
        values, rows = offsets.tolist(), range(0, batch_size * steps + 1, steps)
        if values != sorted(values) or {values[0], values[-1]} != {0, rows[-1]} or not {*rows} <= {*values}:
            raise ValueError(
                f"`cu_seq_lens_q` must rise from 0 to {rows[-1]}, all steps, and have the start of every row."
            )
    starts = torch.zeros(batch_size * steps + 1, dtype=torch.bool, device=offsets.device)
    return starts.scatter(0, offsets.long(), True)[:-1].view(shape)
