"""Recall of the token that followed another one: associative recall, induction heads, phonebook look-up."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hf_recurrent.tasks.example_draws import ExampleDraws, check_integer
from hf_recurrent.tasks.task import Task, targets_at_end

_DIGITS = 10


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


@dataclass(frozen=True)
class Phonebook(Task):
    """Entries of a name and a number, then a name of them, whose number is the target.

    Source: Jelassi et al., "Repeat After Me" (2024), with random letters in place of first and family names. An entry
    is `name:number;`, the query `name:` and the number's digits, each of which is the target of the step before. The
    names of an example are all different, and the one asked for is uniform over them.

    Ids: 0..9 are digits, 10..10+num_letters-1 letters, then ":" and ";".

    Args:
        num_entries: entries of an example.
        name_length: letters of a name.
        number_length: digits of a number.
        num_letters: number of different letters.
    """

    num_entries: int = 10
    name_length: int = 6
    number_length: int = 7
    num_letters: int = 26

    least: ClassVar = {"number_length": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("num_letters", self.num_letters, 2, 26)
        check_integer("name_length", self.name_length, 1, 12)
        check_integer("num_entries", self.num_entries, 1, self.num_letters**self.name_length)

    @property
    def vocab_size(self) -> int:
        return _DIGITS + self.num_letters + 2

    @property
    def length(self) -> int:
        return self.num_entries * (self.name_length + self.number_length + 2) + self.name_length + self.number_length

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        count, entries, letters = draws.num_examples, self.num_entries, self.num_letters
        # Names as numbers in base `num_letters`: different remainders modulo `entries` make them different.
        names = draws.integers("names", entries, letters**self.name_length // entries) * entries
        names = names + draws.permutation("remainders", entries)
        powers = letters ** np.arange(self.name_length - 1, -1, -1)
        names = names[..., None] // powers % letters + _DIGITS
        numbers = draws.integers("numbers", entries * self.number_length, _DIGITS).reshape(count, entries, -1)
        colon, end = (np.full((count, entries, 1), _DIGITS + letters + sign) for sign in range(2))
        listed = np.concatenate([names, colon, numbers, end], axis=2).reshape(count, -1)
        asked = draws.integers("asked", 1, entries)[..., None]
        name, number = (np.take_along_axis(part, asked, axis=1)[:, 0] for part in (names, numbers))
        inputs = np.concatenate([listed, name, colon[:, 0], number[:, :-1]], axis=1)
        return inputs, targets_at_end(inputs, number)

    def token_name(self, token_id: int) -> str:
        if token_id < _DIGITS:
            return str(token_id)
        letter = token_id - _DIGITS
        return chr(ord("a") + letter) if letter < self.num_letters else ":;"[letter - self.num_letters]
