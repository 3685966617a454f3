"""Which bytes a memory is made from and which it has to predict: contexts and futures inside blocks of streams.

An anchor is a position a of a block. Its memory m_a knows the last `context_length` bytes up to x_a, and has to
predict y_a, y_{a+1}, … given x_{a+1}, …. Neither crosses the border of an episode.
"""

import numpy as np
import torch
from torch import Tensor

from hf_recurrent.data.document_order import hash_integers
from hf_recurrent.modeling.causal_lm_loss import IGNORE_INDEX

# Keeps the choices that are made for one row apart from each other.
_ANCHORS, _CUTS, _LENGTHS = range(3)


def choose_anchors(
    streams: np.ndarray, positions: np.ndarray, seed: int, first: int, last: int, num_anchors: int
) -> np.ndarray:
    """Different positions from `first` to `last`, in order and equally likely, (B, num_anchors).

    They depend on the seed, the stream and its position only, whatever the number of processes.

    Args:
        streams: (B,) global numbers of the streams.
        positions: (B, 2) where the streams stand.
    """
    candidates = np.arange(first, last + 1)
    if num_anchors == len(candidates):
        return np.tile(candidates, (len(streams), 1))
    keys = hash_integers(seed, _ANCHORS, *_columns(streams, positions), candidates[None])
    return np.sort(candidates[np.argsort(keys, axis=1, kind="stable")[:, :num_anchors]], axis=1)


def choose_cuts(
    streams: np.ndarray, positions: np.ndarray, seed: int, anchors: np.ndarray, context_length: int, share: float
) -> np.ndarray:
    """Where contexts are made to begin as if an episode began there, (B,), or -1 for rows that are left as they are.

    A `share` of the rows is cut, so that the first anchor has a context of 1 to `context_length` bytes, each as often.
    """
    row = _columns(streams, positions)
    cut = hash_integers(seed, _CUTS, *row)[:, 0] < np.uint64(min(int(share * 2**64), 2**64 - 1))
    lengths = (hash_integers(seed, _LENGTHS, *row)[:, 0] % np.uint64(context_length)).astype(np.int64)
    return np.where(cut, np.maximum(anchors[:, 0] - lengths, 0), -1)


def _columns(streams: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
    return [streams[:, None], positions[:, :1], positions[:, 1:]]


def episode_bounds(reset_mask: Tensor) -> tuple[Tensor, Tensor]:
    """First position of the episode that each position is in, and the one after its last, both (B, T).

    The first position of a block begins an episode, and its last ends one.
    """
    length = reset_mask.shape[1]
    places = torch.arange(length, device=reset_mask.device).expand_as(reset_mask)
    starts = places.masked_fill(~reset_mask, 0).cummax(1).values
    next_starts = places.masked_fill(~reset_mask, length).flip(1).cummin(1).values.flip(1)
    ends = torch.cat([next_starts[:, 1:], next_starts.new_full((len(places), 1), length)], 1)
    return starts, ends


def gather_contexts(input_ids: Tensor, starts: Tensor, anchors: Tensor, context_length: int) -> tuple[Tensor, Tensor]:
    """The bytes that the memories of `anchors` are made from, right-aligned.

    Args:
        input_ids: (B, T).
        starts: (B, T) of [`episode_bounds`].
        anchors: (B, K) positions; a context of -1 is empty.
        context_length: Tc.

    Returns:
        ids (B, K, Tc) and their mask (B, K, Tc), false where the episode had not begun.
    """
    places = anchors[..., None] + torch.arange(1 - context_length, 1, device=anchors.device)
    first = starts.gather(1, anchors.clamp(min=0))[..., None]
    mask = (places >= first) & (places >= 0)
    return _gather(input_ids, places.clamp(min=0)), mask


def gather_futures(
    input_ids: Tensor, shift_labels: Tensor, ends: Tensor, anchors: Tensor, future_length: int
) -> tuple[Tensor, Tensor]:
    """What follows `anchors` (B, K): inputs x_{a+1}, …, x_{a+Tf} and targets y_a, …, y_{a+Tf-1}, both (B, K, Tf).

    Targets beyond the episode or the block are -100, and the inputs there are of no account.
    """
    places = anchors[..., None] + torch.arange(future_length, device=anchors.device)
    last = input_ids.shape[1] - 1
    inputs = _gather(input_ids, (places + 1).clamp(max=last))
    inside = places < ends.gather(1, anchors)[..., None]
    return inputs, _gather(shift_labels, places.clamp(max=last)).masked_fill(~inside, IGNORE_INDEX)


def _gather(tokens: Tensor, places: Tensor) -> Tensor:
    return tokens.gather(1, places.flatten(1)).view_as(places)
