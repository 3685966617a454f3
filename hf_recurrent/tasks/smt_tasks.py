"""The five tasks of Supervised Memory Training, each for one ability of a recurrent network.

Source: "Supervised Memory Training", section 3.1 and appendix E.2 ("Synthetic Tasks"). In addition to `generate`,
every task here has `answers`, which computes the targets of any inputs of its form.

Shape letters: B batch, T steps, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hf_recurrent.argument_checks import check_integer
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.tasks.example_draws import SPLITS, ExampleDraws
from hf_recurrent.tasks.task import Task, targets_at_end

# Keys are drawn as 64-bit numbers.
_MOST_KEYS = 2**62


@dataclass(frozen=True)
class Retrieval(Task):
    """Tests the stability of gradients: recall the token after token 0, the identifier, when it comes again.

    x = 3 4 0 2 1 3 1 0 has the target 2 at the last step. The position of the first identifier and all other tokens,
    1..V-1, are uniform. In the split "train" the target is replaced with probability `label_noise` by a token uniform
    over 1..V-1 (which may be the right one); the other splits have no noise, so that their accuracy is meaningful.

    Args:
        length: T.
        vocab_size: V.
        label_noise: the paper's p.
    """

    length: int = 64
    vocab_size: int = 16
    label_noise: float = 0.0

    least: ClassVar = {"length": 3, "vocab_size": 3}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_noise <= 1:
            raise ValueError(f"`label_noise` is {self.label_noise}; it must be a probability from 0 to 1.")

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(B, T) → targets (B, T), without noise."""
        position = (inputs == 0).argmax(axis=1)[:, None] + 1
        return targets_at_end(inputs, np.take_along_axis(inputs, position, axis=1))

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        inputs = draws.integers("tokens", self.length, self.vocab_size - 1) + 1
        np.put_along_axis(inputs, draws.integers("place", 1, self.length - 2), 0, axis=1)
        inputs[:, -1] = 0
        targets = self.answers(inputs)
        if self.label_noise and draws.split == SPLITS[0]:
            corrupted = draws.uniform("is corrupted", 1) < self.label_noise
            others = draws.integers("corrupted", 1, self.vocab_size - 1) + 1
            targets[:, -1:] = np.where(corrupted, others, targets[:, -1:])
        return inputs, targets


@dataclass(frozen=True)
class StringCopy(Task):
    """Tests memory capacity: a random string, then delimiters (token 0) whose targets are the string reversed.

    x = 3 4 1 2 0 0 0 0 has the targets 2 1 4 3 at the last four steps. Tokens of the string are uniform in 1..V-1.

    Args:
        length: T, even: the string and its answer.
        vocab_size: V.
    """

    length: int = 64
    vocab_size: int = 16

    least: ClassVar = {"length": 2, "vocab_size": 3}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length % 2:
            raise ValueError(f"`length` is {self.length}; it must be even: a string and an answer of its length.")

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(B, T) → targets (B, T)."""
        return targets_at_end(inputs, inputs[:, : self.length // 2][:, ::-1])

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        half = self.length // 2
        inputs = np.zeros((draws.num_examples, self.length), dtype=np.int64)
        inputs[:, :half] = draws.integers("string", half, self.vocab_size - 1) + 1
        return inputs, self.answers(inputs)


@dataclass(frozen=True)
class StackOperations(Task):
    """Tests state tracking: tokens 1..V-1 are pushed, token 0 pops; the target at a pop is the token popped.

    x = 1 0 2 3 0 1 0 0 has the targets 1, 3, 1 and 2 at its pops. A step pushes or pops with probability 1/2, but an
    empty stack is never popped and a full one always is; pushed tokens are uniform.

    Args:
        length: T.
        max_depth: capacity of the stack, the paper's state complexity.
        vocab_size: V.
    """

    length: int = 64
    max_depth: int = 8
    vocab_size: int = 16

    least: ClassVar = {"length": 2, "max_depth": 1, "vocab_size": 2}

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(B, T) → targets (B, T), for inputs that never pop an empty stack."""
        targets = np.full_like(inputs, IGNORE_INDEX)
        rows = np.arange(len(inputs))
        stack, depth = np.zeros_like(inputs), np.zeros(len(inputs), dtype=np.int64)
        for step in range(inputs.shape[1]):
            token = inputs[:, step]
            pops = token == 0
            depth -= pops
            targets[pops, step] = stack[rows[pops], depth[pops]]
            stack[rows[~pops], depth[~pops]] = token[~pops]
            depth += ~pops
        return targets

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        inputs = draws.integers("pushed", self.length, self.vocab_size - 1) + 1
        wants_pop = draws.integers("pops", self.length, 2) == 1
        depth = np.zeros(draws.num_examples, dtype=np.int64)
        for step in range(self.length):
            pops = (wants_pop[:, step] & (depth > 0)) | (depth == self.max_depth)
            inputs[pops, step] = 0
            depth += np.where(pops, -1, 1)
        return inputs, self.answers(inputs)


@dataclass(frozen=True)
class KeysValues(Task):
    """Tests associative recall: keys and their values, a delimiter, and one of the keys, whose value is the target.

    x = b 1 a 3 d 2 | a has the target 3 at the last step. (The paper's example has a token of no pair instead of the
    delimiter.) Keys and values are strings. The first token of a value is the target at the last token of the key, and
    each further one the target at a filler after it. Keys of an example are all different and their set is uniform;
    values, which may repeat, and the query are uniform too.

    Ids: 0 is delimiter and filler, 1..(V-1) // 2 are the symbols of keys, the rest the symbols of values.
    T = (num_pairs + 1) · (key_length + value_length).

    Args:
        num_pairs: associations of an example.
        key_length, value_length: tokens of a key and of a value, the paper's association complexity.
        vocab_size: V.
    """

    num_pairs: int = 8
    key_length: int = 1
    value_length: int = 1
    vocab_size: int = 33

    least: ClassVar = {"value_length": 1, "vocab_size": 4}

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = int(math.log(_MOST_KEYS, max(self._num_key_symbols, 2)))
        check_integer("key_length", self.key_length, 1, longest)
        check_integer("num_pairs", self.num_pairs, 1, self._num_key_symbols**self.key_length)

    @property
    def _num_key_symbols(self) -> int:
        return (self.vocab_size - 1) // 2

    @property
    def length(self) -> int:
        return (self.num_pairs + 1) * (self.key_length + self.value_length)

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(B, T) → targets (B, T)."""
        pair = self.key_length + self.value_length
        end = self.num_pairs * pair
        pairs = inputs[:, :end].reshape(len(inputs), self.num_pairs, pair)
        asked = inputs[:, None, end + 1 : end + 1 + self.key_length]
        which = (pairs[:, :, : self.key_length] == asked).all(axis=2).argmax(axis=1)
        return targets_at_end(inputs, pairs[np.arange(len(inputs)), which, self.key_length :])

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        num_examples, num_pairs, symbols = draws.num_examples, self.num_pairs, self._num_key_symbols
        numbers = self._different_numbers(draws, symbols**self.key_length)
        keys = numbers[..., None] // symbols ** np.arange(self.key_length) % symbols + 1
        values = draws.integers("values", num_pairs * self.value_length, self.vocab_size - 1 - symbols) + symbols + 1
        values = values.reshape(num_examples, num_pairs, self.value_length)
        pairs = np.concatenate([keys, values], axis=2).reshape(num_examples, -1)
        query = draws.integers("query", 1, num_pairs)[..., None]
        inputs = np.zeros((num_examples, self.length), dtype=np.int64)
        end = pairs.shape[1]
        inputs[:, :end] = pairs
        inputs[:, end + 1 : end + 1 + self.key_length] = np.take_along_axis(keys, query, axis=1)[:, 0]
        return inputs, self.answers(inputs)

    def _different_numbers(self, draws: ExampleDraws, bound: int) -> np.ndarray:
        """(B, num_pairs) numbers below `bound`, different within an example, in random order.

        Floyd's method needs no list of all numbers (Bentley and Floyd, "Programming pearls: a sample of brilliance",
        1987).
        """
        largest = np.arange(bound - self.num_pairs, bound, dtype=np.uint64)
        drawn = (draws.words("keys", self.num_pairs) % (largest + np.uint64(1))).astype(np.int64)
        for position in range(1, self.num_pairs):
            taken = (drawn[:, :position] == drawn[:, position, None]).any(axis=1)
            drawn[taken, position] = largest[position]
        return np.take_along_axis(drawn, draws.permutation("order", self.num_pairs), axis=1)

    def token_name(self, token_id: int) -> str:
        if token_id == 0:
            return "|"
        num_keys = self._num_key_symbols
        return f"k{token_id - 1}" if token_id <= num_keys else f"v{token_id - num_keys - 1}"


@dataclass(frozen=True)
class ModularArithmetic(Task):
    """Tests in-context learning: x_0 y_0 x_1 y_1 … with y_i = (a x_i + b) mod V; the target at x_i is y_i.

    a and b are drawn for every example, uniform in 0..max_a and 0..max_b, and every x_i in 0..V-1. As in the paper,
    there is no target at a y_i, and there is one at x_0, although y_0 cannot be known there. So no model reaches an
    accuracy of 1.

    Args:
        num_shots: pairs of an example, the paper's in-context examples; T = 2 · num_shots.
        max_a, max_b: the largest a and b, the paper's difficulty.
        vocab_size: V.
    """

    num_shots: int = 16
    max_a: int = 3
    max_b: int = 3
    vocab_size: int = 16

    least: ClassVar = {"num_shots": 1, "vocab_size": 2}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("max_a", self.max_a, 0, self.vocab_size - 1)
        check_integer("max_b", self.max_b, 0, self.vocab_size - 1)

    @property
    def length(self) -> int:
        return 2 * self.num_shots

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(B, T) → targets (B, T)."""
        targets = np.full_like(inputs, IGNORE_INDEX)
        targets[:, 0::2] = inputs[:, 1::2]
        return targets

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        a, b = draws.integers("a", 1, self.max_a + 1), draws.integers("b", 1, self.max_b + 1)
        inputs = np.empty((draws.num_examples, self.length), dtype=np.int64)
        x = draws.integers("x", self.num_shots, self.vocab_size)
        inputs[:, 0::2], inputs[:, 1::2] = x, (a * x + b) % self.vocab_size
        return inputs, self.answers(inputs)
