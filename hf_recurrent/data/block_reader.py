"""Rows of episodes cut into blocks (B, T): where every byte, target and reset of a stream comes from.

Rows are read ahead by many blocks at once, a slice copy for each piece of an episode, so that T = 1 costs no Python
for each byte. Only what the asked blocks need is kept: nothing read ahead is part of a position.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_recurrent.modeling.causal_lm_loss import IGNORE_INDEX

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus


_INSIDE, _START, _PADDING = 0, 1, 2
_BYTES_AHEAD, _BLOCKS_AHEAD, _BYTES_AHEAD_OF_ALL_ROWS = 4096, 512, 1 << 24
_EPISODES_AHEAD = 32

Schedule = Callable[[np.ndarray, np.ndarray, int], list[np.ndarray]]
"""(rows, first numbers, count) → for each row the episodes first, first + 1, … of it: at most `count`, fewer only
where the row ends."""


@dataclass
class Block:
    """T bytes of every row: inputs, targets (B, T) int64; resets, attended (B, T) bool; the positions after it
    (B, 2) int64 as pairs (number of the episode within the row, offset in the episode)."""

    inputs: np.ndarray
    targets: np.ndarray
    resets: np.ndarray
    attended: np.ndarray
    positions: np.ndarray

    def rows(self, part: slice) -> "Block":
        """A copy of some rows, in memory of its own: what is sent to another process must not drag the rest along."""
        return Block(*(getattr(self, field.name)[part].copy() for field in fields(self)))


class BlockReader:
    """Reads blocks of B rows; each row is a sequence of episodes.

    Args:
        corpus: where the episodes are.
        block_size: T.
        schedule: which episodes a row is made of.
        positions: (B, 2), where the rows begin.
        first_offsets: (B,), the offset at which a row at position (0, 0) begins.

    Raises:
        ValueError: a position outside its episode.
    """

    def __init__(
        self,
        corpus: "Corpus",
        block_size: int,
        schedule: Schedule,
        positions: np.ndarray,
        first_offsets: np.ndarray | None = None,
    ) -> None:
        self._corpus, self._schedule, self._block_size = corpus, schedule, block_size
        self._rows = len(positions)
        self._positions = positions.copy()
        self._resets = positions[:, 1] == 0  # whether the row's next byte is one
        if first_offsets is not None:
            fresh = (positions == 0).all(axis=1)
            self._positions[fresh, 1] = first_offsets[fresh]
        bytes_ahead = min(_BYTES_AHEAD, _BYTES_AHEAD_OF_ALL_ROWS // self._rows)
        self._blocks = max(1, min(bytes_ahead // block_size, _BLOCKS_AHEAD))
        self._first_block = self._next_block = 0
        shape = (self._rows, self._blocks * block_size + 1)  # one more, the target of the last
        self._inputs = np.zeros(shape, dtype=corpus.store.dtype)
        self._kinds = np.zeros(shape, dtype=np.uint8)
        self._after = np.zeros((self._blocks, self._rows, 2), dtype=np.int64)
        self._ahead_first = self._positions[:, 0].copy()
        self._ahead: list[tuple[list[int], list[int]]] = [
            self._bounds(episodes) for episodes in schedule(np.arange(self._rows), self._ahead_first, _EPISODES_AHEAD)
        ]
        for row in range(self._rows):
            number, offset = self._positions[row].tolist()
            bounds = self._episode(row, number)
            if offset and (bounds is None or offset >= bounds[1] - bounds[0]):
                raise ValueError(
                    f"positions holds offset {offset} in episode {number} of row {row}, which is not that long: "
                    "they belong to another corpus, seed or number of streams"
                )

    def block(self, index: int) -> Block:
        """Block `index`, counted from the positions. Indices must grow from call to call; blocks that are left out
        are skipped without reading them."""
        while index >= self._next_block:
            self._first_block = self._next_block
            self._next_block += self._blocks
            self._read_ahead(copy=index < self._next_block)
        ahead = index - self._first_block
        begin, end = ahead * self._block_size, (ahead + 1) * self._block_size
        kinds, next_kinds = self._kinds[:, begin:end], self._kinds[:, begin + 1 : end + 1]
        targets = self._inputs[:, begin + 1 : end + 1].astype(np.int64)
        end_target = IGNORE_INDEX if self._corpus.end_token_id is None else self._corpus.end_token_id
        np.putmask(targets, next_kinds != _INSIDE, end_target)
        np.putmask(targets, kinds == _PADDING, IGNORE_INDEX)
        return Block(
            inputs=self._inputs[:, begin:end].astype(np.int64),
            targets=targets,
            resets=kinds == _START,
            attended=kinds != _PADDING,
            positions=self._after[ahead].copy(),
        )

    def _bounds(self, episodes: np.ndarray) -> tuple[list[int], list[int]]:
        return self._corpus.starts[episodes].tolist(), self._corpus.ends[episodes].tolist()

    def _episode(self, row: int, number: int) -> tuple[int, int] | None:
        """Where episode `number` of the row begins and ends in the store, or None after the row's last."""
        place = number - int(self._ahead_first[row])
        starts, ends = self._ahead[row]
        if place >= len(starts):
            if len(starts) < _EPISODES_AHEAD:
                return None
            self._ahead_first[row], place = number, 0
            (episodes,) = self._schedule(np.array([row]), np.array([number]), _EPISODES_AHEAD)
            starts, ends = self._ahead[row] = self._bounds(episodes)
            if not starts:
                return None
        return starts[place], ends[place]

    def _read_ahead(self, copy: bool) -> None:
        size = self._blocks * self._block_size
        block_ends = np.arange(1, self._blocks + 1) * self._block_size
        # Right for rows that stay inside their episode; the others are written over.
        self._after[:, :, 0] = self._positions[:, 0]
        np.add(block_ends[:, None], self._positions[:, 1], out=self._after[:, :, 1])
        if copy:
            self._kinds.fill(_INSIDE)
        first_resets = self._resets.copy()
        self._resets[:] = False
        store, inputs = self._corpus.store, self._inputs
        for row, (number, offset) in enumerate(self._positions.tolist()):
            bounds = self._episode(row, number)
            if bounds is not None and bounds[1] - bounds[0] - offset > size:
                if copy:
                    begin = bounds[0] + offset
                    inputs[row] = store[begin : begin + size + 1]
            else:
                self._read_row(row, number, offset, block_ends, copy)
        self._positions = self._after[-1].copy()
        if copy:
            np.putmask(self._kinds[:, 0], first_resets & (self._kinds[:, 0] == _INSIDE), _START)

    def _read_row(self, row: int, number: int, offset: int, block_ends: np.ndarray, copy: bool) -> None:
        """Fill a row that episodes begin or end in, and the positions after its blocks."""
        size = self._blocks * self._block_size
        inputs, kinds, store = self._inputs[row], self._kinds[row], self._corpus.store
        first_number, filled = number, 0
        piece_begins, piece_offsets = [], []
        while filled <= size:
            piece_begins.append(filled)
            piece_offsets.append(offset)
            bounds = self._episode(row, number)
            if bounds is None:
                if copy:
                    inputs[filled:] = 0
                    kinds[filled:] = _PADDING
                break
            begin = bounds[0] + offset
            count = min(bounds[1] - begin, size + 1 - filled)
            if copy:
                inputs[filled : filled + count] = store[begin : begin + count]
                if not offset:
                    kinds[filled] = _START
            filled += count
            number, offset = number + 1, 0
        pieces = np.searchsorted(piece_begins, block_ends, side="right") - 1
        offsets = np.array(piece_offsets)[pieces] + block_ends - np.array(piece_begins)[pieces]
        if bounds is None:
            offsets[pieces == len(piece_begins) - 1] = 0
        self._after[:, row, 0] = first_number + pieces
        self._after[:, row, 1] = offsets
        # The byte after the last block is read again next time, as its first.
        self._resets[row] = offsets[-1] == 0


def to_batch(block: Block, streams: np.ndarray) -> dict[str, torch.Tensor]:
    """A block as the tensors of a batch."""
    return {
        "input_ids": torch.from_numpy(block.inputs),
        "shift_labels": torch.from_numpy(block.targets),
        "reset_mask": torch.from_numpy(block.resets),
        "stream_indices": torch.from_numpy(streams.copy()),
        "stream_positions": torch.from_numpy(block.positions),
    }
