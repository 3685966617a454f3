"""A task as continuous streams: each an endless row of examples, in blocks that need not line up with them."""

from typing import TYPE_CHECKING

import numpy as np

from hf_recurrent.data.block_dataset import BlockDataset
from hf_recurrent.data.block_reader import Block
from hf_recurrent.data.document_order import DocumentOrder, hash_integers
from hf_recurrent.data.stream_arguments import worker_share

if TYPE_CHECKING:
    from hf_recurrent.tasks.task import Task

_TOKENS_AHEAD = 1 << 18


class TaskStreams(BlockDataset):
    """Endless ready batches of a task's training examples; use `DataLoader(dataset, batch_size=None)`.

    Stream k of n reads the examples D[k], D[k+n], D[k+2n], … one after another, each an episode with a reset at its
    first step. For an endless task D is 0, 1, 2, … (for other seeds of the streams, a row that begins far away); for
    one of `num_examples`, a seeded permutation of them per epoch. With `block_size` = `task.length` a block is one
    example; other sizes cut through examples, and the state has to be carried.

    Batches have the keys of `MultiStreamDataset`; `shift_labels` are the targets, which stand at the step that
    predicts, and `stream_positions` are (examples read, offset in the next). What a stream shows depends on the task,
    n and the seed only.

    Args:
        corpus: the task.
        num_streams, block_size, seed, stream_indices, accumulation_groups, positions: see `MultiStreamDataset`.

    Raises:
        ValueError: an argument that is not allowed, or positions that do not belong to this task.
    """

    corpus: "Task"

    def prepare(self) -> None:
        task = self.corpus
        for positions in self.group_positions:
            if (positions[:, 1] >= task.length).any():
                offset = int(positions[:, 1].max())
                raise ValueError(
                    f"positions holds the offset {offset}, but examples of {task.name!r} have {task.length} steps: "
                    "they belong to another task"
                )
        if task.num_examples is not None:
            self._order = DocumentOrder(task.num_examples, self.seed)
        else:
            # 2^40 examples are more than any run reads, so rows of different beginnings do not meet.
            beginning = int(hash_integers(self.seed)[0] >> np.uint64(42)) << 40 if self.seed else 0
            self._order = lambda places: places + beginning

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_order"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.prepare()

    def group_reader(self, group: int) -> "_GroupReader":
        return _GroupReader(self, group, alone=worker_share()[1] == 1)


class _GroupReader:
    """Blocks of one group of streams, from examples that are generated some at a time and kept while needed."""

    def __init__(self, streams: TaskStreams, group: int, alone: bool) -> None:
        self._task, self._block_size = streams.corpus, streams.block_size
        self._order, self._num_streams = streams._order, streams.num_streams
        self._streams, positions = streams.stream_groups[group], streams.group_positions[group]
        length = self._task.length
        self._begin = positions[:, 0] * length + positions[:, 1]
        # Examples that a block can touch, and without other workers as many more as are cheaper made together.
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
        """Examples first, first + 1, … of every stream."""
        self._first = first
        numbers = first[:, None] + np.arange(self._window)
        places = self._streams[:, None] + numbers * self._num_streams
        inputs, targets = self._task.examples(self._order(places).ravel())
        self._inputs, self._targets = (part.reshape(len(first), -1) for part in (inputs, targets))
