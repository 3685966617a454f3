"""State tracking: parity and the composition of permutations, where every step changes the answer."""

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.tasks.example_draws import ExampleDraws, check_integer
from hf_recurrent.tasks.task import Task


@dataclass(frozen=True)
class Parity(Task):
    """Random bits; the target is the parity of the bits so far.

    Linear recurrences with eigenvalues between 0 and 1 cannot solve this at all lengths; those with negative or
    complex ones can (Grazzi et al., "Unlocking state-tracking in linear RNNs through negative eigenvalues", 2025). Ids
    are the bits, V = 2.

    Args:
        length: T.
        final_only: a target at the last step only.
    """

    length: int = 64
    final_only: bool = False
    vocab_size = 2

    least: ClassVar = {"length": 1}

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        inputs = draws.integers("bits", self.length, 2)
        return inputs, _asked(np.cumsum(inputs, axis=1) & 1, self.final_only)


@dataclass(frozen=True)
class PermutationComposition(Task):
    """Random permutations; the target is the composition of all so far.

    Source: the word problem of S_n (Merrill, Petty and Sabharwal, "The illusion of state in state-space models",
    2024); for n = 5 it is complete for NC¹, and S_3 is the smallest group that does not commute. Permutations are
    numbered in lexicographic order, 0 is the identity, V = n!; inputs are uniform. After x_1 … x_t the target is
    x_t ∘ … ∘ x_1: element j goes to x_1[j], then to x_2[x_1[j]].

    Args:
        length: T.
        num_elements: n, 2 to 6.
        final_only: a target at the last step only.
    """

    length: int = 64
    num_elements: int = 3
    final_only: bool = False

    least: ClassVar = {"length": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("num_elements", self.num_elements, 2, 6)

    @property
    def vocab_size(self) -> int:
        return math.factorial(self.num_elements)

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        inputs = draws.integers("permutations", self.length, self.vocab_size)
        table = _composition_table(self.num_elements)
        products = np.empty_like(inputs)
        product = np.zeros(draws.num_examples, dtype=np.int64)
        for step in range(self.length):
            product = table[inputs[:, step], product]
            products[:, step] = product
        return inputs, _asked(products, self.final_only)

    def token_name(self, token_id: int) -> str:
        return "".join(map(str, _permutations(self.num_elements)[token_id].tolist()))


@cache
def _permutations(num_elements: int) -> np.ndarray:
    """(V, num_elements), in lexicographic order."""
    return np.array(list(itertools.permutations(range(num_elements))))


@cache
def _composition_table(num_elements: int) -> np.ndarray:
    """(V, V): [a, b] is the number of a ∘ b, first b, then a."""
    permutations = _permutations(num_elements)
    digits = num_elements ** np.arange(num_elements)[::-1]  # as numbers, permutations ascend
    together = permutations[:, permutations]  # [a, b, j] = a[b[j]]
    return np.searchsorted(permutations @ digits, together @ digits)


def _asked(answers: np.ndarray, final_only: bool) -> np.ndarray:
    if final_only:
        answers[:, :-1] = IGNORE_INDEX
    return answers
