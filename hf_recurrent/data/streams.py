"""Continuous streams: B endless sequences of episodes, read in parallel in blocks of T bytes.

The bytes of a stream depend only on the corpus, the seed and the number of streams: not on processes, accumulation
groups, DataLoader workers, T, or resuming.
"""

import numpy as np

from hf_recurrent.data.block_dataset import BlockDataset
from hf_recurrent.data.block_reader import BlockReader
from hf_recurrent.data.document_order import DocumentOrder


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
        positions: `stream_positions` to continue from, by stream: an array (n, 2), or a dictionary from stream to
            pair. None to start at the beginning.

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
