"""`TaskStreams`: a task as continuous streams of examples, in blocks of any length."""

from typing import TYPE_CHECKING

import numpy as np

from hf_recurrent.data.block_dataset import BlockDataset, worker_share
from hf_recurrent.data.block_reader import Block
from hf_recurrent.data.document_order import DocumentOrder, hash_integers

if TYPE_CHECKING:
    from hf_recurrent.tasks.task import Task

_TOKENS_AHEAD = 1 << 18


class TaskStreams(BlockDataset):
    """Endless complete batches of a task's training examples; use `DataLoader(dataset, batch_size=None)`.

    Stream k of n reads the examples D[k], D[k+n], D[k+2n], …, each an episode with a reset at its first step. D is a
    seeded permutation per epoch if the task has `num_examples`; otherwise it is 0, 1, 2, …, or starts far from 0 for
    other seeds. With `block_size` = `task.length` a block is one example; other sizes cut examples, so the state must
    be carried.

    Batches have the keys of [`MultiStreamDataset`]; `shift_labels` are the targets, and `stream_positions` are
    (examples read, offset in the next). The examples of a stream depend on the task, n and the seed only.

    Args:
        corpus: the task.
        num_streams, block_size, seed, stream_indices, accumulation_groups, positions: see [`MultiStreamDataset`].

    Raises:
        ValueError: an argument is invalid, or the positions do not belong to this task.
    """

    corpus: "Task"

    def prepare(self) -> None:
        task = self.corpus
        for positions in self.group_positions:
            if (positions[:, 1] >= task.length).any():
                offset = int(positions[:, 1].max())
                raise ValueError(
                    f"`positions` has the offset {offset}, but examples of {task.name!r} have {task.length} steps; it "
                    "belongs to another task."
                )
        if task.num_examples is not None:
            self._order = DocumentOrder(task.num_examples, self.seed)
        else:
            # No run reads 2^40 examples, so the examples of different seeds do not overlap.
            beginning = int(hash_integers(self.seed)[0] >> np.uint64(42)) << 40 if self.seed else 0
            self._order = lambda ranks: ranks + beginning

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_order"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.prepare()

    def group_reader(self, group: int) -> "_GroupReader":
        return _GroupReader(self, group, alone=worker_share()[1] == 1)


class _GroupReader:
    """Reader of one group of streams, which generates several examples at a time."""

    def __init__(self, streams: TaskStreams, group: int, alone: bool) -> None:
        self._task, self._block_size = streams.corpus, streams.block_size
        self._order, self._num_streams = streams._order, streams.num_streams
        self._streams, positions = streams.stream_groups[group], streams.group_positions[group]
        length = self._task.length
        self._begin = positions[:, 0] * length + positions[:, 1]
        # Examples that a block can overlap; without other workers more, because larger batches are cheaper.
        self._window = (self._block_size + length - 2) // length + 1
        if alone:
            self._window = max(self._window, _TOKENS_AHEAD // (length * len(self._streams)))
        self._first = np.full(len(self._streams), -self._window - 1, dtype=np.int64)
        self._inputs = self._targets = np.empty((len(self._streams), 0), dtype=np.int64)

    def block(self, index: int) -> Block:
        """Block `index` of every stream of the group, counted from the positions."""
        length = self._task.length
        begin = self._begin + index * self._block_size
        end = begin + self._block_size
        if ((begin // length < self._first) | ((end - 1) // length >= self._first + self._window)).any():
            self._generate(begin // length)
        steps = (begin - self._first * length)[:, None] + np.arange(self._block_size)
        resets = steps % length == 0
        return Block(
            inputs=np.take_along_axis(self._inputs, steps, axis=1),
            targets=np.take_along_axis(self._targets, steps, axis=1),
            resets=resets,
            attended=np.ones_like(resets),
            positions=np.stack(np.divmod(end, length), axis=1),
        )

    def _generate(self, first: np.ndarray) -> None:
        """Generate the examples first, first + 1, … of every stream."""
        self._first = first
        numbers = first[:, None] + np.arange(self._window)
        ranks = self._streams[:, None] + numbers * self._num_streams
        inputs, targets = self._task.examples(self._order(ranks).ravel())
        self._inputs, self._targets = (part.reshape(len(first), -1) for part in (inputs, targets))
