"""The five tasks of Supervised Memory Training, each for one thing that a recurrent network has to learn.

Source: "Supervised Memory Training", section 3.1 and appendix E.2 ("Synthetic Tasks"). Beside `generate`, every task
here has `answers`, which finds what is asked in any inputs of its form.

Shape letters: n examples, T steps, V vocabulary.
"""

import math
from dataclasses import dataclass

import numpy as np

from hf_recurrent.tasks.example_draws import SPLITS, ExampleDraws, check_integer
from hf_recurrent.tasks.task import IGNORED, Task

# Keys are drawn as numbers, which have 64 bits.
_MOST_KEYS = 2**62


@dataclass(frozen=True)
class Retrieval(Task):
    """Token 0, the identifier, stands in a random row and again at its end: asked is what followed it. Tests the
    stability of gradients.

    x = 3 4 0 2 1 3 1 0 asks for 2 at the last step. The first identifier's place and all other tokens, 1..V-1, are
    uniform. In the split "train" the answer is replaced by a token uniform over 1..V-1 (the right one among them) with
    probability `label_noise`; the answers of the other splits are right, so that accuracy says what was learned.

    Args:
        length: T.
        vocab_size: V.
        label_noise: the paper's p.

    Raises:
        ValueError: fewer than 3 steps or ids, or a probability outside 0..1.
    """

    length: int = 64
    vocab_size: int = 16
    label_noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("length", self.length, 3)
        check_integer("vocab_size", self.vocab_size, 3)
        if not 0 <= self.label_noise <= 1:
            raise ValueError(f"label_noise is {self.label_noise}, allowed is a probability from 0 to 1")

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(n, T) → targets (n, T), without noise."""
        place = (inputs == 0).argmax(axis=1)[:, None] + 1
        targets = np.full_like(inputs, IGNORED)
        targets[:, -1:] = np.take_along_axis(inputs, place, axis=1)
        return targets

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
    """A random string, then as many delimiters (token 0), where it is asked for backwards. Tests memory capacity.

    x = 3 4 1 2 0 0 0 0 asks for 2 1 4 3 at the last four steps. Tokens of the string are uniform in 1..V-1.

    Args:
        length: T, even: the string and its answer.
        vocab_size: V.

    Raises:
        ValueError: a length that is odd or below 2, or fewer than 3 ids.
    """

    length: int = 64
    vocab_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("length", self.length, 2)
        if self.length % 2:
            raise ValueError(f"length is {self.length}, allowed is an even number: a string and as long an answer")
        check_integer("vocab_size", self.vocab_size, 3)

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(n, T) → targets (n, T)."""
        half = self.length // 2
        targets = np.full_like(inputs, IGNORED)
        targets[:, half:] = inputs[:, :half][:, ::-1]
        return targets

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        half = self.length // 2
        inputs = np.zeros((draws.num_examples, self.length), dtype=np.int64)
        inputs[:, :half] = draws.integers("string", half, self.vocab_size - 1) + 1
        return inputs, self.answers(inputs)


@dataclass(frozen=True)
class StackOperations(Task):
    """A token in 1..V-1 is pushed, token 0 pops: asked at every pop is what comes off the stack. Tests state
    tracking.

    x = 1 0 2 3 0 1 0 0 asks for 1, 3, 1 and 2 at its pops. A step pushes or pops with probability 1/2, but an empty
    stack is never popped and a full one always; pushed tokens are uniform.

    Args:
        length: T.
        max_depth: how much the stack holds, the paper's state complexity.
        vocab_size: V.

    Raises:
        ValueError: a number that is too small.
    """

    length: int = 64
    max_depth: int = 8
    vocab_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("length", self.length, 2)
        check_integer("max_depth", self.max_depth, 1)
        check_integer("vocab_size", self.vocab_size, 2)

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(n, T) → targets (n, T), for rows that pop no empty stack."""
        targets = np.full_like(inputs, IGNORED)
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
    """Keys, each followed by its value; then a delimiter and one of the keys: asked is its value. Tests associative
    recall.

    x = b 1 a 3 d 2 | a asks for 3 at the last step. (In the paper's example, a token that belongs to no pair stands
    where the delimiter is here.) Keys and values are strings; of a value of several tokens, the first is asked at the
    last token of the key and one more at each of the fillers after it. The keys of an example are all different, their
    set is uniform, and so are values, which may repeat, and the key asked for.

    Ids: 0 is delimiter and filler, 1..K are the symbols of keys with K = (V-1) // 2, and K+1..V-1 those of values.
    T = num_pairs · (key_length + value_length) + 1 + key_length + value_length - 1.

    Args:
        num_pairs: associations of an example.
        key_length, value_length: tokens of a key and of a value, the paper's association complexity.
        vocab_size: V.

    Raises:
        ValueError: a number out of its range, such as more pairs than there are keys.
    """

    num_pairs: int = 8
    key_length: int = 1
    value_length: int = 1
    vocab_size: int = 33

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("vocab_size", self.vocab_size, 4)
        longest = int(math.log(_MOST_KEYS, max(self._num_key_symbols, 2)))
        check_integer("key_length", self.key_length, 1, longest)
        check_integer("value_length", self.value_length, 1)
        check_integer("num_pairs", self.num_pairs, 1, self._num_key_symbols**self.key_length)

    @property
    def _num_key_symbols(self) -> int:
        return (self.vocab_size - 1) // 2

    @property
    def length(self) -> int:
        return (self.num_pairs + 1) * (self.key_length + self.value_length)

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(n, T) → targets (n, T)."""
        pair = self.key_length + self.value_length
        end = self.num_pairs * pair
        pairs = inputs[:, :end].reshape(len(inputs), self.num_pairs, pair)
        asked = inputs[:, None, end + 1 : end + 1 + self.key_length]
        which = (pairs[:, :, : self.key_length] == asked).all(axis=2).argmax(axis=1)
        targets = np.full_like(inputs, IGNORED)
        targets[:, -self.value_length :] = pairs[np.arange(len(inputs)), which, self.key_length :]
        return targets

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
        """(n, num_pairs) numbers below `bound`, all different in a row, in random order: Floyd's way, which needs no
        list of all numbers (Bentley and Floyd, "Programming pearls: a sample of brilliance", 1987)."""
        largest = np.arange(bound - self.num_pairs, bound, dtype=np.uint64)
        drawn = (draws.words("keys", self.num_pairs) % (largest + np.uint64(1))).astype(np.int64)
        for place in range(1, self.num_pairs):
            taken = (drawn[:, :place] == drawn[:, place, None]).any(axis=1)
            drawn[taken, place] = largest[place]
        return np.take_along_axis(drawn, draws.permutation("order", self.num_pairs), axis=1)

    def token_name(self, token_id: int) -> str:
        if token_id == 0:
            return "|"
        num_keys = self._num_key_symbols
        return f"k{token_id - 1}" if token_id <= num_keys else f"v{token_id - num_keys - 1}"


@dataclass(frozen=True)
class ModularArithmetic(Task):
    """x_0 y_0 x_1 y_1 … with y_i = (a x_i + b) mod V: asked at every x_i is y_i. Tests in-context learning.

    a and b are drawn anew for every example, uniform in 0..max_a and 0..max_b, and every x_i in 0..V-1. What is asked
    is the paper's: nothing at a y_i, and at x_0 the answer y_0, although nothing read so far tells it. So no model
    answers everything; `best_answers` is what can be reached.

    Args:
        num_shots: pairs of an example, the paper's in-context examples; T = 2 · num_shots.
        max_a, max_b: the largest a and b, the paper's difficulty.
        vocab_size: V.

    Raises:
        ValueError: a number out of its range.
    """

    num_shots: int = 16
    max_a: int = 3
    max_b: int = 3
    vocab_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("num_shots", self.num_shots, 1)
        check_integer("vocab_size", self.vocab_size, 2)
        check_integer("max_a", self.max_a, 0, self.vocab_size - 1)
        check_integer("max_b", self.max_b, 0, self.vocab_size - 1)

    @property
    def length(self) -> int:
        return 2 * self.num_shots

    def answers(self, inputs: np.ndarray) -> np.ndarray:
        """(n, T) → targets (n, T)."""
        targets = np.full_like(inputs, IGNORED)
        targets[:, 0::2] = inputs[:, 1::2]
        return targets

    def best_answers(self, inputs: np.ndarray) -> np.ndarray:
        """The likeliest answer wherever one is asked, given all that was read: (n, T) → (n, T), -100 elsewhere.

        Its accuracy is what no model exceeds on average, the first answer being little better than a guess.
        """
        a, b = (grid.ravel() for grid in np.mgrid[: self.max_a + 1, : self.max_b + 1])
        possible = np.ones((len(inputs), len(a)), dtype=bool)
        best = np.full_like(inputs, IGNORED)
        for step in range(0, self.length, 2):
            values = (a * inputs[:, step, None] + b) % self.vocab_size
            counts = np.zeros((len(inputs), self.vocab_size), dtype=np.int64)
            np.add.at(counts, (np.arange(len(inputs))[:, None], values), possible)
            best[:, step] = counts.argmax(axis=1)
            possible &= values == inputs[:, step + 1, None]
        return best

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        a, b = draws.integers("a", 1, self.max_a + 1), draws.integers("b", 1, self.max_b + 1)
        inputs = np.empty((draws.num_examples, self.length), dtype=np.int64)
        x = draws.integers("x", self.num_shots, self.vocab_size)
        inputs[:, 0::2], inputs[:, 1::2] = x, (a * x + b) % self.vocab_size
        return inputs, self.answers(inputs)
