"""`BlockDataset`: base class of endless blocks, with groups of streams and their positions."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from hf_recurrent.data.block_reader import Block, to_batch

if TYPE_CHECKING:
    from hf_recurrent.data.episode_source import EpisodeSource


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
        self.group_positions = [stream_positions(self.num_streams, positions, group) for group in self.stream_groups]
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
    """The streams of this process, int64, in `accumulation_groups` equal groups.

    Raises:
        ValueError: an index that is outside 0..num_streams-1 or occurs twice, or groups that would not be equal.
    """
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


def stream_positions(num_streams: int, positions: Any, needed: np.ndarray) -> np.ndarray:
    """The positions (number, offset) at which the streams `needed` begin: (len(needed), 2) int64.

    Args:
        positions: None for the beginning, or an array or tensor (num_streams, 2).

    Raises:
        ValueError: another shape, or a negative number.
    """
    if positions is None:
        return np.zeros((len(needed), 2), dtype=np.int64)
    array = np.asarray(positions)
    if array.shape != (num_streams, 2) or array.dtype.kind not in "iu" or array.min() < 0:
        raise ValueError(
            f"`positions` is {array.dtype} {array.shape}; it must be integers of at least 0, ({num_streams}, 2)."
        )
    return array[needed].astype(np.int64)


def worker_share() -> tuple[int, int]:
    """(index of this DataLoader worker, number of workers); (0, 1) outside a worker.

    With three workers, worker 0 makes the batches 0, 3, 6, …; the DataLoader takes from the workers in turn, so that
    the order does not depend on their number.
    """
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)
