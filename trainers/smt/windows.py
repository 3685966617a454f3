"""Contexts and futures inside blocks of streams: the bytes that a memory encodes, and those that it predicts.

An anchor is a position a of a block. Its memory m_a encodes the last Tc bytes up to x_a, and predicts the targets y_a,
y_{a+1}, … given x_{a+1}, …. Neither crosses the boundary of an episode.

Shape letters: B streams or batch, T steps, Tc context, Tf future.
"""

import numpy as np
import torch
from torch import Tensor

from hf_recurrent.data.document_order import hash_integers
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX

# Makes the random choices for one block independent of each other.
_ANCHORS, _CUTS, _LENGTHS = range(3)


def choose_anchors(
    streams: np.ndarray, positions: np.ndarray, seed: int, first: int, last: int, num_anchors: int
) -> np.ndarray:
    """Draw distinct positions from `first` to `last`, sorted and equally likely: (B, num_anchors).

    They depend only on the seed, and on the global number (B,) and position (B, 2) of each stream after the block.
    """
    candidates = np.arange(first, last + 1)
    if num_anchors == len(candidates):
        return np.tile(candidates, (len(streams), 1))
    keys = hash_integers(seed, _ANCHORS, *_columns(streams, positions), candidates[None])
    return np.sort(candidates[np.argsort(keys, axis=1, kind="stable")[:, :num_anchors]], axis=1)


def choose_cuts(
    streams: np.ndarray, positions: np.ndarray, seed: int, anchors: np.ndarray, context_length: int, share: float
) -> np.ndarray:
    """Draw positions (B,) at which contexts are cut as if an episode began there; -1 for blocks that are not cut.

    A fraction `share` of the blocks is cut, so that the context of the first anchor has 1 to `context_length` bytes,
    equally likely.
    """
    keys = _columns(streams, positions)
    cut = hash_integers(seed, _CUTS, *keys)[:, 0] < np.uint64(min(int(share * 2**64), 2**64 - 1))
    lengths = (hash_integers(seed, _LENGTHS, *keys)[:, 0] % np.uint64(context_length)).astype(np.int64)
    return np.where(cut, np.maximum(anchors[:, 0] - lengths, 0), -1)


def _columns(streams: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
    return [streams[:, None], positions[:, :1], positions[:, 1:]]


def episode_bounds(reset_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Start and end (exclusive) of the episode of each position, both (B, T), from `reset_mask` (B, T).

    The boundaries of the block count as boundaries of episodes.
    """
    length = reset_mask.shape[1]
    offsets = torch.arange(length, device=reset_mask.device).expand_as(reset_mask)
    starts = offsets.masked_fill(~reset_mask, 0).cummax(1).values
    next_starts = offsets.masked_fill(~reset_mask, length).flip(1).cummin(1).values.flip(1)
    ends = torch.cat([next_starts[:, 1:], next_starts.new_full((len(offsets), 1), length)], 1)
    return starts, ends


def gather_contexts(input_ids: Tensor, starts: Tensor, anchors: Tensor, context_length: int) -> tuple[Tensor, Tensor]:
    """Contexts of `anchors` (B, anchors), padded on the left: ids and mask, both (B, anchors, Tc).

    The mask is false before the start of the episode, of `starts` (B, T); the context of an anchor of -1 is empty.
    """
    offsets = anchors[..., None] + torch.arange(1 - context_length, 1, device=anchors.device)
    first = starts.gather(1, anchors.clamp(min=0))[..., None]
    mask = (offsets >= first) & (offsets >= 0)
    return _gather(input_ids, offsets.clamp(min=0)), mask


def gather_futures(
    input_ids: Tensor, shift_labels: Tensor, ends: Tensor, anchors: Tensor, future_length: int
) -> tuple[Tensor, Tensor]:
    """Inputs x_{a+1}, …, x_{a+Tf} and targets y_a, …, y_{a+Tf-1} of `anchors` (B, anchors), both (B, anchors, Tf).

    Targets beyond the episode or the block are -100; the inputs there are arbitrary.
    """
    offsets = anchors[..., None] + torch.arange(future_length, device=anchors.device)
    last = input_ids.shape[1] - 1
    inputs = _gather(input_ids, (offsets + 1).clamp(max=last))
    inside = offsets < ends.gather(1, anchors)[..., None]
    return inputs, _gather(shift_labels, offsets.clamp(max=last)).masked_fill(~inside, IGNORE_INDEX)


def _gather(tokens: Tensor, offsets: Tensor) -> Tensor:
    return tokens.gather(1, offsets.flatten(1)).view_as(offsets)
