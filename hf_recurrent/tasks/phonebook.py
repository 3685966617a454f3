"""Phonebook look-up: copy the number of a name out of a list of entries."""

from dataclasses import dataclass

import numpy as np

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.tasks.example_draws import ExampleDraws, check_integer
from hf_recurrent.tasks.task import Task

_DIGITS = 10


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

    Raises:
        ValueError: a number that is too small, or more entries than names.
    """

    num_entries: int = 10
    name_length: int = 6
    number_length: int = 7
    num_letters: int = 26

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("num_letters", self.num_letters, 2, 26)
        check_integer("name_length", self.name_length, 1, 12)
        check_integer("number_length", self.number_length, 1)
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
        targets = np.full_like(inputs, IGNORE_INDEX)
        targets[:, -self.number_length :] = number
        return inputs, targets

    def token_name(self, token_id: int) -> str:
        if token_id < _DIGITS:
            return str(token_id)
        letter = token_id - _DIGITS
        return chr(ord("a") + letter) if letter < self.num_letters else ":;"[letter - self.num_letters]
