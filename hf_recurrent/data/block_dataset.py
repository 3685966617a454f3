"""`BlockDataset`: base class of endless blocks, with groups of streams and their positions; `BlockReader`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus
    from hf_recurrent.data.episode_source import EpisodeSource


_INSIDE, _START, _PADDING = 0, 1, 2
_BYTES_AHEAD, _BLOCKS_AHEAD, _BYTES_AHEAD_OF_ALL_ROWS = 4096, 512, 1 << 24
_EPISODES_AHEAD = 32

Schedule = Callable[[np.ndarray, np.ndarray, int], list[np.ndarray]]
"""(sequences, first numbers, count) → for each sequence, its episodes first, first + 1, …: `count`, or fewer at its
end."""


@dataclass
class Block:
    """T bytes of B streams: inputs, targets (B, T) int64; resets, attended (B, T) bool; positions after the block
    (B, 2) int64, as pairs (number of the episode in the stream, offset in the episode); of a streamed source, also
    bookmarks (B, L) uint8, with which reading begins near these positions."""

    inputs: np.ndarray
    targets: np.ndarray
    resets: np.ndarray
    attended: np.ndarray
    positions: np.ndarray
    bookmarks: np.ndarray | None = None

    def rows(self, part: slice) -> "Block":
        """A copy of some rows: a view sent to another process would take the whole block along."""
        values = (getattr(self, field.name) for field in fields(self))
        return Block(*(None if value is None else value[part].copy() for value in values))


def make_block(
    tokens: np.ndarray,
    kinds: np.ndarray,
    end_token_id: int | None,
    positions: np.ndarray,
    bookmarks: np.ndarray | None = None,
) -> Block:
    """The block of tokens (B, T + 1), whose last are targets only; kinds (B, T + 1): inside, start or padding."""
    kinds, next_kinds = kinds[:, :-1], kinds[:, 1:]
    targets = tokens[:, 1:].astype(np.int64)
    np.putmask(targets, next_kinds != _INSIDE, IGNORE_INDEX if end_token_id is None else end_token_id)
    np.putmask(targets, kinds == _PADDING, IGNORE_INDEX)
    inputs = tokens[:, :-1].astype(np.int64)
    return Block(inputs, targets, kinds == _START, kinds != _PADDING, positions, bookmarks)


class BlockReader:
    """Reads blocks of B streams, each a sequence of episodes, from `positions` (B, 2).

    Streams at position (0, 0) start at `first_offsets` (B,). A position outside its episode raises a ValueError.
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
        self._resets = positions[:, 1] == 0  # the next byte of the row is a reset
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
        for row, (number, offset) in enumerate(self._positions.tolist()):
            bounds = self._episode(row, number)
            if offset and (bounds is None or offset >= bounds[1] - bounds[0]):
                raise ValueError(
                    f"`positions` has offset {offset} in episode {number} of row {row}, beyond its end; it belongs to "
                    "another corpus, seed or number of streams."
                )

    def block(self, index: int) -> Block:
        """Block `index`, counted from the positions; indices must increase, and skipped blocks are not read."""
        while index >= self._next_block:
            self._first_block = self._next_block
            self._next_block += self._blocks
            self._read_ahead(copy=index < self._next_block)
        ahead = index - self._first_block
        steps = slice(ahead * self._block_size, (ahead + 1) * self._block_size + 1)
        tokens, kinds = self._inputs[:, steps], self._kinds[:, steps]
        return make_block(tokens, kinds, self._corpus.end_token_id, self._after[ahead].copy())

    def _bounds(self, episodes: np.ndarray) -> tuple[list[int], list[int]]:
        return self._corpus.starts[episodes].tolist(), self._corpus.ends[episodes].tolist()

    def _episode(self, row: int, number: int) -> tuple[int, int] | None:
        """Start and end in the store of episode `number` of the row; None after its last."""
        index = number - int(self._ahead_first[row])
        starts, ends = self._ahead[row]
        if index >= len(starts):
            if len(starts) < _EPISODES_AHEAD:
                return None
            self._ahead_first[row], index = number, 0
            (episodes,) = self._schedule(np.array([row]), np.array([number]), _EPISODES_AHEAD)
            starts, ends = self._ahead[row] = self._bounds(episodes)
            if not starts:
                return None
        return starts[index], ends[index]

    def _read_ahead(self, copy: bool) -> None:
        size = self._blocks * self._block_size
        block_ends = np.arange(1, self._blocks + 1) * self._block_size
        # Correct for rows that stay inside their episode; overwritten for the others.
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
        """Fill a row with more than one episode, and the positions after its blocks."""
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
        # The byte after the last block is read again as the first byte of the next.
        self._resets[row] = offsets[-1] == 0


def to_batch(block: Block, streams: np.ndarray) -> dict[str, torch.Tensor]:
    """The tensors of a batch, see [`MultiStreamDataset`]."""
    batch = {
        "input_ids": torch.from_numpy(block.inputs),
        "shift_labels": torch.from_numpy(block.targets),
        "reset_mask": torch.from_numpy(block.resets),
        "stream_indices": torch.from_numpy(streams.copy()),
        "stream_positions": torch.from_numpy(block.positions),
    }
    return batch if block.bookmarks is None else batch | {"stream_bookmarks": torch.from_numpy(block.bookmarks)}


class GroupReader(Protocol):
    """Reader of one group of streams."""

    def block(self, index: int) -> Block:
        """Block `index` of every stream of the group, counted from the positions."""


class BlockDataset(IterableDataset):
    """Base class of endless blocks of the source `corpus`; subclasses define `group_reader`.

    See [`MultiStreamDataset`] for the arguments.

    Attributes:
        stream_groups: global numbers of the streams of each accumulation group.
        group_positions: start positions (B, 2) of the streams of each group.
        group_bookmarks: `stream_bookmarks` (L,) uint8, or None, of each of the streams of each group.
    """

    def __init__(
        self,
        corpus: "EpisodeSource",
        num_streams: int,
        block_size: int,
        seed: int = 0,
        *,
        stream_indices: Sequence[int] | np.ndarray | None = None,
        accumulation_groups: int = 1,
        positions: Any = None,
        bookmarks: Any = None,
    ) -> None:
        super().__init__()
        self.corpus = corpus
        self.num_streams = check_count("num_streams", num_streams)
        self.block_size = check_count("block_size", block_size)
        self.seed = seed
        groups = check_count("accumulation_groups", accumulation_groups)
        self.stream_groups = stream_groups(self.num_streams, stream_indices, groups)
        self._positions, self._bookmarks = check_positions(self.num_streams, positions), bookmarks
        self.group_positions = [self._positions[group] for group in self.stream_groups]
        self.group_bookmarks = [
            [None if bookmarks is None else bookmarks[stream] for stream in group] for group in self.stream_groups
        ]
        self.prepare()

    def prepare(self) -> None:
        """Called at the end of `__init__`; a ValueError if the positions do not belong to the source."""

    def group_reader(self, group: int) -> GroupReader:
        """Return the reader of a group of streams that starts at the positions of the group."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from `positions` on; each iterator starts over."""
        worker, num_workers = worker_share()
        num_groups = len(self.stream_groups)
        readers: dict[int, GroupReader] = {}  # built when needed: a worker may not read all groups
        batch = worker
        while True:
            index, group = divmod(batch, num_groups)
            if group not in readers:
                readers[group] = self.group_reader(group)
            yield to_batch(readers[group].block(index), self.stream_groups[group])
            batch += num_workers

    @property
    def step_bytes(self) -> int:
        """Bytes of one optimizer step, over all processes and accumulation groups."""
        return self.num_streams * self.block_size


def check_count(name: str, value: int) -> int:
    """Return `value` if it is an integer of at least 1, else raise a ValueError."""
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"`{name}` is {value}; it must be an integer of at least 1.")
    return int(value)


def stream_groups(
    num_streams: int, stream_indices: Sequence[int] | np.ndarray | None, accumulation_groups: int
) -> list[np.ndarray]:
    """The streams of this process, int64, in `accumulation_groups` equal groups."""
    indices = np.arange(num_streams) if stream_indices is None else np.asarray(stream_indices)
    if indices.ndim != 1 or not len(indices) or indices.dtype.kind not in "iu":
        raise ValueError(f"`stream_indices` is {stream_indices}; it must be a list of at least one integer.")
    if indices.min() < 0 or indices.max() >= num_streams or len(np.unique(indices)) != len(indices):
        raise ValueError(
            f"`stream_indices` is {stream_indices}; it must hold different integers from 0 to {num_streams - 1}."
        )
    if len(indices) % accumulation_groups:
        raise ValueError(f"`accumulation_groups` is {accumulation_groups}; it must divide the {len(indices)} streams.")
    return np.split(indices.astype(np.int64), accumulation_groups)


def check_positions(num_streams: int, positions: Any) -> np.ndarray:
    """Positions of all streams as (num_streams, 2) int64; None is the beginning."""
    if positions is None:
        return np.zeros((num_streams, 2), dtype=np.int64)
    array = np.asarray(positions)
    if array.shape != (num_streams, 2) or array.dtype.kind not in "iu" or array.min() < 0:
        raise ValueError(
            f"`positions` is {array.dtype} {array.shape}; it must be integers of at least 0, ({num_streams}, 2)."
        )
    return array.astype(np.int64)


def worker_share() -> tuple[int, int]:
    """(index of this DataLoader worker, number of workers); (0, 1) outside a worker.

    With three workers, worker 0 makes the batches 0, 3, 6, …; the DataLoader takes from the workers in turn, so that
    the order does not depend on their number.
    """
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)
