"""`BlockDataset`: base class of endless blocks, with groups of streams and their positions."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hf_recurrent.data.block_reader import Block, to_batch
from hf_recurrent.data.stream_arguments import check_count, stream_groups, stream_positions, worker_share

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
        positions: object = None,
    ) -> None:
        super().__init__()
        self.corpus = corpus
        self.num_streams = check_count("num_streams", num_streams)
        self.block_size = check_count("block_size", block_size)
        self.seed = seed
        groups = check_count("accumulation_groups", accumulation_groups)
        self.stream_groups = stream_groups(self.num_streams, stream_indices, groups)
        self.group_positions = [stream_positions(self.num_streams, positions, group) for group in self.stream_groups]
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
