"""`TaskDataset`: examples of a task for trainers that take a map-style dataset and shift the labels."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.tasks.example_draws import check_integer, check_split

if TYPE_CHECKING:
    from hf_recurrent.tasks.task import Task


class TaskDataset(Dataset):
    """Examples 0, 1, … of a split as dictionaries of `input_ids` and `labels`, both (T + 1,) int64.

    Causal models of transformers predict `labels[t + 1]` at step t. The targets of a task are not shifted, so `labels`
    are the targets one step later, with one more step (input 0) at the end for the last of them.

    Args:
        task: the task.
        num_examples: number of examples; by default the task's in this split.
        split: "train", "validation" or "test".
    """

    def __init__(self, task: "Task", num_examples: int | None = None, split: str = "train") -> None:
        self.task, self.split = task, check_split(split)
        size = task.default_size(split) if num_examples is None else num_examples
        if size is None:
            raise ValueError(
                f"`num_examples` is None; it must be a number, because the task {task.name!r} is endless."
            )
        check_integer("num_examples", size, 1)
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """A batch of examples; a DataLoader calls this, and generation is vectorized."""
        if not all(0 <= index < self._size for index in indices):
            raise IndexError(f"`indices` is {indices}; the dataset has {self._size} examples.")
        inputs, targets = self.task.examples(np.asarray(indices), self.split)
        input_ids = torch.from_numpy(np.pad(inputs, ((0, 0), (0, 1))))
        labels = torch.from_numpy(np.pad(targets, ((0, 0), (1, 0)), constant_values=IGNORE_INDEX))
        return [{"input_ids": row, "labels": label} for row, label in zip(input_ids, labels, strict=True)]
