"""State tracking: the flip-flop language, parity and the composition of permutations."""

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from hf_recurrent.argument_checks import check_integer
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.tasks.example_draws import ExampleDraws
from hf_recurrent.tasks.task import Task

_WRITE, _READ, _IGNORE = 2, 3, 4
_NAMES = "01wri"


@dataclass(frozen=True)
class FlipFlop(Task):
    """Alternating instructions (w, r, i) and bits; the target at r is the bit after the last w, and this bit follows.

    Source: Liu et al., "Exposing attention glitches with flip-flop language modeling" (2023), FFL(T, p): the first
    instruction is w, the last is r, the others are i with probability p and otherwise w or r with equal probability;
    bits after w and i are uniform. Training: T = 512, p = 0.8. The sparse test is `FlipFlop(p_ignore=0.98)`: the last
    w is 100 instructions back on average, in training 10.

    Ids: 0 and 1 are the bits, 2 is w (write), 3 is r (read), 4 is i (ignore).

    Args:
        length: T, even.
        p_ignore: p.
    """

    length: int = 512
    p_ignore: float = 0.8
    vocab_size = 5

    least: ClassVar = {"length": 4}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length % 2:
            raise ValueError(f"`length` is {self.length}; it must be even: instructions and bits alternate.")
        if not 0 <= self.p_ignore <= 1:
            raise ValueError(f"`p_ignore` is {self.p_ignore}; it must be a probability from 0 to 1.")

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        count = self.length // 2
        chance = draws.uniform("instructions", count)
        p_write = (1 - self.p_ignore) / 2
        instructions = np.where(chance < p_write, _WRITE, np.where(chance < 2 * p_write, _READ, _IGNORE))
        instructions[:, 0], instructions[:, -1] = _WRITE, _READ
        bits = draws.integers("bits", count, 2)
        last_write = np.maximum.accumulate(np.where(instructions == _WRITE, np.arange(count), 0), axis=1)
        remembered = np.take_along_axis(bits, last_write, axis=1)
        reads = instructions == _READ
        inputs = np.empty((draws.num_examples, self.length), dtype=np.int64)
        inputs[:, 0::2], inputs[:, 1::2] = instructions, np.where(reads, remembered, bits)
        targets = np.full_like(inputs, IGNORE_INDEX)
        targets[:, 0::2] = np.where(reads, remembered, IGNORE_INDEX)
        return inputs, targets

    def token_name(self, token_id: int) -> str:
        return _NAMES[token_id]


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
