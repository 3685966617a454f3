"""`EvaluationStreams`: every episode exactly once in parallel streams, for evaluation with the state carried."""

import heapq
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hf_recurrent.data.block_reader import BlockReader, to_batch
from hf_recurrent.data.stream_arguments import check_count, stream_groups, worker_share

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus


class EvaluationStreams(IterableDataset):
    """Batches with every episode of the corpus once, from its first byte to its end id.

    Episodes are assigned longest first, each to the stream with the fewest bytes so far. Finished streams are padded:
    input 0, target -100, attention 0. Batches have the keys of [`MultiStreamDataset`] and `attention_mask` (B, T)
    int64.

    Args:
        corpus: the episodes.
        num_streams: number of streams over all processes.
        block_size: T.
        stream_indices: streams of this process; by default all.

    Raises:
        ValueError: an argument is invalid.
    """

    def __init__(
        self,
        corpus: "Corpus",
        num_streams: int,
        block_size: int,
        *,
        stream_indices: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        super().__init__()
        self.corpus = corpus
        self.num_streams = check_count("num_streams", num_streams)
        self.block_size = check_count("block_size", block_size)
        (self.stream_indices,) = stream_groups(self.num_streams, stream_indices, 1)
        stream_of_episode, longest = _assign(corpus.ends - corpus.starts, self.num_streams)
        by_stream = np.argsort(stream_of_episode, kind="stable")
        borders = np.searchsorted(stream_of_episode[by_stream], np.arange(1, self.num_streams))
        episodes = np.split(by_stream, borders)
        self._episodes = [episodes[stream] for stream in self.stream_indices.tolist()]
        self.num_batches = -(-longest // self.block_size)  # the same on all processes

    @property
    def step_bytes(self) -> int:
        """Bytes of one batch over all processes, including padding."""
        return self.num_streams * self.block_size

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker, num_workers = worker_share()

        def schedule(rows: np.ndarray, first: np.ndarray, count: int) -> list[np.ndarray]:
            return [
                self._episodes[row][number : number + count]
                for row, number in zip(rows.tolist(), first.tolist(), strict=True)
            ]

        positions = np.zeros((len(self.stream_indices), 2), dtype=np.int64)
        reader = BlockReader(self.corpus, self.block_size, schedule, positions)
        for index in range(worker, self.num_batches, num_workers):
            block = reader.block(index)
            attention_mask = torch.from_numpy(block.attended.astype(np.int64))
            yield to_batch(block, self.stream_indices) | {"attention_mask": attention_mask}


def _assign(lengths: np.ndarray, num_streams: int) -> tuple[np.ndarray, int]:
    """Stream of every episode, int32, and the length of the longest stream."""
    streams = np.empty(len(lengths), dtype=np.int32)
    loads = [(0, stream) for stream in range(num_streams)]
    order = np.argsort(-lengths, kind="stable")
    for episode, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        load, stream = loads[0]
        streams[episode] = stream
        heapq.heapreplace(loads, (load + length, stream))
    return streams, max(load for load, _ in loads)
