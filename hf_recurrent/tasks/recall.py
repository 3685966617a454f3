"""Recall of the token that followed another one: associative recall and induction heads."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hf_recurrent.tasks.example_draws import ExampleDraws, check_integer
from hf_recurrent.tasks.task import Task, targets_at_end


@dataclass(frozen=True)
class AssociativeRecall(Task):
    """Pairs of a key and its value, then queries: keys whose values are the targets.

    Source: Ba et al., "Using fast weights to attend to the recent past" (2016), as in H3 (Fu et al., 2023); with
    several queries as in Arora et al., "Zoology" (2024). The keys of an example are all different, so each query has
    one answer. Values are uniform and may repeat; queries are uniform over the keys shown and may repeat.

    Ids: 0..num_keys-1 are keys, num_keys..num_keys+num_values-1 are values. Length: 2 · num_pairs + num_queries.

    Args:
        num_pairs: pairs of an example.
        num_keys: number of different keys.
        num_values: number of different values.
        num_queries: queries at the end.
    """

    num_pairs: int = 8
    num_keys: int = 16
    num_values: int = 16
    num_queries: int = 1

    least: ClassVar = {"num_keys": 1, "num_values": 2, "num_queries": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("num_pairs", self.num_pairs, 1, self.num_keys)

    @property
    def vocab_size(self) -> int:
        return self.num_keys + self.num_values

    @property
    def length(self) -> int:
        return 2 * self.num_pairs + self.num_queries

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        keys = draws.permutation("keys", self.num_keys)[:, : self.num_pairs]
        values = draws.integers("values", self.num_pairs, self.num_values) + self.num_keys
        queries = draws.integers("queries", self.num_queries, self.num_pairs)
        asked = 2 * self.num_pairs
        inputs = np.empty((draws.num_examples, self.length), dtype=np.int64)
        inputs[:, 0:asked:2], inputs[:, 1:asked:2] = keys, values
        inputs[:, asked:] = np.take_along_axis(keys, queries, axis=1)
        return inputs, targets_at_end(inputs, np.take_along_axis(values, queries, axis=1))

    def token_name(self, token_id: int) -> str:
        return f"k{token_id}" if token_id < self.num_keys else f"v{token_id - self.num_keys}"


@dataclass(frozen=True)
class InductionHeads(Task):
    """A special token in a random sequence, and again at its end, where the target is the token after the first one.

    Source: Olsson et al. (2022), in the form of Fu et al. (H3, 2023) and Gu and Dao (2024): trained at length 256 with
    V = 16, tested at 64 to 2^20. Ids 0..V-2 are uniform and V-1 is the special token, whose first position is uniform.

    Args:
        length: T.
        vocab_size: V.
    """

    length: int = 256
    vocab_size: int = 16

    least: ClassVar = {"length": 3, "vocab_size": 3}

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        inputs = draws.integers("tokens", self.length, self.vocab_size - 1)
        positions = draws.integers("place", 1, self.length - 2)
        targets = targets_at_end(inputs, np.take_along_axis(inputs, positions + 1, axis=1))
        np.put_along_axis(inputs, positions, self.vocab_size - 1, axis=1)
        inputs[:, -1] = self.vocab_size - 1
        return inputs, targets

    def token_name(self, token_id: int) -> str:
        return "*" if token_id == self.vocab_size - 1 else str(token_id)
