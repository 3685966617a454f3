"""Blocks of T bytes from a corpus: continuous streams, the IID baseline, and every episode once for evaluation.

A stream is an endless sequence of episodes; B of them are read in parallel. Its bytes depend only on the corpus, the
seed and the number of streams: not on processes, accumulation groups, DataLoader workers, T, or resuming.
"""

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hf_recurrent.data.block_dataset import Block, BlockDataset, BlockReader, make_block, to_batch
from hf_recurrent.data.document_order import DocumentOrder, hash_integers

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus

# Of the IID baseline. Up to this T, blocks are gathered with one indexing operation; above it, with one slice each.
_GATHERED = 64
_BLOCKS_AHEAD, _ROWS_AHEAD = 64, 2048


class MultiStreamDataset(BlockDataset):
    """Endless complete batches; use `DataLoader(dataset, batch_size=None)`.

    With D the endless order of documents (a seeded permutation of all of them per epoch), stream k of n reads D[k],
    D[k+n], D[k+2n], … If there are fewer documents than streams, streams with the same first document start at evenly
    spaced offsets in it.

    A batch is a dictionary of tensors, with B the streams of one accumulation group of this process:

    | key | shape | |
    |---|---|---|
    | `input_ids` | (B, T) int64 | the next T bytes of every stream |
    | `shift_labels` | (B, T) int64 | the byte after each; after an episode's last byte its end id, or -100 |
    | `reset_mask` | (B, T) bool | true at the first byte of an episode, and at the start of a stream |
    | `stream_indices` | (B,) int64 | global numbers of the streams |
    | `stream_positions` | (B, 2) int64 | positions after the block: (documents read, offset in the next) |

    Args:
        corpus: the episodes.
        num_streams: n, over all processes and accumulation groups.
        block_size: T.
        seed: seed of the order of documents.
        stream_indices: streams of this process, in the order of its micro-batches; by default all.
        accumulation_groups: number of micro-batches; batches are of group 0, 1, …, 0, 1, …
        positions: (n, 2) `stream_positions` of all streams to continue from; None to start at the beginning.
        bookmarks: (n, L) `stream_bookmarks` of all streams, of sources whose batches have them; else None.

    Raises:
        ValueError: an argument is invalid, or the positions do not belong to this corpus.
    """

    def prepare(self) -> None:
        self._order = DocumentOrder(len(self.corpus), self.seed)
        self._first_offsets = self._spread_streams()
        for group in range(len(self.stream_groups)):
            self.group_reader(group)  # raises if the positions do not belong to this corpus

    def group_reader(self, group: int) -> BlockReader:
        streams = self.stream_groups[group]

        def schedule(rows: np.ndarray, first: np.ndarray, count: int) -> list[np.ndarray]:
            numbers = first[:, None] + np.arange(count)
            return list(self._order(streams[rows][:, None] + numbers * self.num_streams))

        return BlockReader(
            self.corpus, self.block_size, schedule, self.group_positions[group], self._first_offsets[streams]
        )

    def _spread_streams(self) -> np.ndarray:
        """Offset of every stream in its first document: (num_streams,) int64."""
        offsets = np.zeros(self.num_streams, dtype=np.int64)
        if len(self.corpus) >= self.num_streams:
            return offsets
        documents = self._order(np.arange(self.num_streams))
        for document in range(len(self.corpus)):
            sharing = np.flatnonzero(documents == document)
            length = int(self.corpus.ends[document] - self.corpus.starts[document])
            offsets[sharing] = np.arange(len(sharing)) * length // max(len(sharing), 1)
        return offsets


def unreached_documents(
    corpus: "Corpus", num_streams: int, stream_bytes: int, seed: int, max_bytes: float
) -> np.ndarray:
    """Indices (int64), in the order of the first epoch, of documents that no stream of [`MultiStreamDataset`] reaches.

    Args:
        stream_bytes: bytes that every stream reads.
        max_bytes: total length of the documents at most; they are not cut.
    """
    total, lengths = len(corpus), corpus.ends - corpus.starts
    order = DocumentOrder(total, seed)
    reached, positions, begins = np.zeros(total, bool), np.arange(num_streams), np.zeros(num_streams, np.int64)
    while not reached.all() and (begins < stream_bytes).any():
        documents = order(positions)
        reached[documents[begins < stream_bytes]] = True
        positions, begins = positions + num_streams, begins + lengths[documents]
    rest = order(np.arange(total))
    rest = rest[~reached[rest]]
    return rest[np.cumsum(lengths[rest]) <= max_bytes]


class IIDDataset(BlockDataset):
    """The IID baseline: endless complete batches of independent blocks, each read from a zero state.

    See [`MultiStreamDataset`] for arguments, keys and errors. A block is a contiguous part of the corpus, which wraps
    around; all starts are equally likely. `reset_mask` is true at the first byte of every block and of every episode
    in it. A block depends on the seed, its stream and the step only; `stream_positions` is (steps done, 0).
    """

    def prepare(self) -> None:
        if any(first[:, 1].any() for first in self.group_positions):
            raise ValueError("`positions` has an offset other than 0; it belongs to another regime.")
        self._ends = np.cumsum(self.corpus.ends - self.corpus.starts)

    def group_reader(self, group: int) -> "_IIDReader":
        return _IIDReader(self, group)

    def _block(self, streams: np.ndarray, steps: np.ndarray) -> Block:
        corpus, size = self.corpus, self.block_size
        total = np.uint64(self._ends[-1])
        positions = (hash_integers(self.seed, streams, steps) % total).astype(np.int64)
        episodes = np.searchsorted(self._ends, positions, side="right")
        left = self._ends[episodes] - positions  # bytes left in the episode
        begins = corpus.ends[episodes] - left
        shape = (len(streams), size + 1)
        tokens = np.empty(shape, dtype=corpus.store.dtype)
        starts = np.zeros(shape, dtype=bool)
        inside = np.flatnonzero(left > size)
        if size <= _GATHERED:
            tokens[inside] = corpus.store[begins[inside, None] + np.arange(size + 1)]
        else:
            for row, begin in zip(inside.tolist(), begins[inside].tolist(), strict=True):
                tokens[row] = corpus.store[begin : begin + size + 1]
        for row in np.flatnonzero(left <= size).tolist():
            self._cross_episodes(tokens[row], starts[row], int(episodes[row]), int(begins[row]))
        starts[:, 0] = True
        after = np.stack([steps + 1, np.zeros_like(steps)], axis=1)
        return make_block(tokens, starts, corpus.end_token_id, after)

    def _cross_episodes(self, tokens: np.ndarray, starts: np.ndarray, episode: int, begin: int) -> None:
        corpus, filled = self.corpus, 0
        while filled < len(tokens):
            if filled:
                starts[filled] = True
            count = min(int(corpus.ends[episode]) - begin, len(tokens) - filled)
            tokens[filled : filled + count] = corpus.store[begin : begin + count]
            filled += count
            episode = (episode + 1) % len(corpus)
            begin = int(corpus.starts[episode])


class _IIDReader:
    """Reader of one group of streams; for small T it makes many blocks at once, as the overhead of calls dominates."""

    def __init__(self, dataset: IIDDataset, group: int) -> None:
        self._dataset, self._streams = dataset, dataset.stream_groups[group]
        self._first = dataset.group_positions[group][:, 0]
        ahead = max(1, min(_BLOCKS_AHEAD, _ROWS_AHEAD // len(self._streams)))
        self._ahead = np.arange(ahead if dataset.block_size <= _GATHERED else 1)
        self._blocks: dict[int, Block] = {}
        self._last = -1

    def block(self, index: int) -> Block:
        if index not in self._blocks:
            indices = index + self._ahead * (index - self._last)  # workers take blocks at regular intervals
            size = len(self._streams)
            together = self._dataset._block(
                np.tile(self._streams, len(indices)), (indices[:, None] + self._first).ravel()
            )
            parts = [together]
            if len(indices) > 1:
                parts = [together.rows(slice(row, row + size)) for row in range(0, len(indices) * size, size)]
            self._blocks = dict(zip(indices.tolist(), parts, strict=True))
        self._last = index
        return self._blocks.pop(index)


class EvaluationStreams(IterableDataset):
    """Batches with every episode of the corpus once, from its first byte to its end id.

    Episodes are assigned longest first, each to the stream with the fewest bytes so far. Finished streams are padded:
    input 0, target -100, attention 0. Batches have the keys of [`MultiStreamDataset`] and `attention_mask` (B, T)
    int64, with `num_streams` = B and `block_size` = T.
    """

    def __init__(self, corpus: "Corpus", num_streams: int, block_size: int) -> None:
        super().__init__()
        self.corpus, self.num_streams, self.block_size = corpus, num_streams, block_size
        stream_of_episode, longest = _assign(corpus.ends - corpus.starts, num_streams)
        by_stream = np.argsort(stream_of_episode, kind="stable")
        borders = np.searchsorted(stream_of_episode[by_stream], np.arange(1, num_streams))
        self._episodes = np.split(by_stream, borders)
        self.num_batches = -(-longest // block_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        def schedule(rows: np.ndarray, first: np.ndarray, count: int) -> list[np.ndarray]:
            return [
                self._episodes[row][number : number + count]
                for row, number in zip(rows.tolist(), first.tolist(), strict=True)
            ]

        streams = np.arange(self.num_streams)
        reader = BlockReader(self.corpus, self.block_size, schedule, np.zeros((self.num_streams, 2), dtype=np.int64))
        for index in range(self.num_batches):
            block = reader.block(index)
            yield to_batch(block, streams) | {"attention_mask": torch.from_numpy(block.attended.astype(np.int64))}


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
