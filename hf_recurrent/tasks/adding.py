"""The adding problem: the sum of two marked numbers of a sequence."""

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_recurrent.tasks.example_draws import ExampleDraws, check_integer, check_split


class AddingProblem(Dataset):
    """Sequences of numbers, two of them marked; the target is their sum.

    Source: Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997), in the form of Arjovsky et al., "Unitary
    Evolution Recurrent Neural Networks" (2016): numbers are uniform between 0 and 1, one mark is uniform in the first
    half of the sequence, the other in the second. Always answering 1 has a mean squared error of 1/6.

    Items are `input_values` (T, 2) float32, the number and 1 at a marked step or 0, and `labels` (1,) float32. Example
    i of a split is a pure function of (seed, length, split, i).

    Args:
        num_examples: number of sequences.
        length: T, 2 or more.
        split: "train", "validation" or "test".
        seed: any integer.
    """

    def __init__(self, num_examples: int, length: int = 100, split: str = "train", *, seed: int = 0) -> None:
        check_integer("num_examples", num_examples, 1)
        check_integer("length", length, 2)
        self.num_examples, self.length, self.split, self.seed = num_examples, length, check_split(split), seed

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """A whole batch, generated at once; the DataLoader calls this where it exists."""
        if not all(0 <= index < self.num_examples for index in indices):
            raise IndexError(f"`indices` is {indices}; there are {self.num_examples} examples.")
        draws = ExampleDraws(self.seed, self.split, np.asarray(indices, dtype=np.int64))
        half = self.length // 2
        positions = np.concatenate(
            [draws.integers("first", 1, half), half + draws.integers("second", 1, self.length - half)], axis=1
        )
        values = np.zeros((len(indices), self.length, 2), dtype=np.float32)
        values[..., 0] = draws.uniform("numbers", self.length)
        np.put_along_axis(values[..., 1], positions, 1.0, axis=1)
        sums = np.take_along_axis(values[..., 0], positions, axis=1).sum(1, keepdims=True)
        return [
            {"input_values": inputs, "labels": label}
            for inputs, label in zip(torch.from_numpy(values), torch.from_numpy(sums), strict=True)
        ]
