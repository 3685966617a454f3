"""Recall: copying of tokens, and of the token that followed another one (associative recall, induction heads)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hf_recurrent.argument_checks import check_integer
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.tasks.example_draws import ExampleDraws
from hf_recurrent.tasks.task import Task, targets_at_end


@dataclass(frozen=True)
class Copying(Task):
    """Data tokens, then blanks, then one marker per data token, whose targets are the data in order.

    Sources: Hochreiter and Schmidhuber (1997) in the form of Arjovsky et al. (2016): 10 tokens of 8 symbols, `delay`
    blanks, 10 markers (the defaults). Zucchet et al., "Online learning of long-range dependencies" (2023), section 4.1
    and appendix B.1: `Copying(num_tokens=20, delay=7, num_symbols=2**7)`, 20 patterns of 7 bits; their models read and
    predict the bits themselves. `num_symbols=2` copies single bits.

    Ids: 0 is the blank, 1..num_symbols are data, num_symbols + 1 is the marker.

    Args:
        num_tokens: number of data tokens.
        delay: number of blanks between data and markers.
        num_symbols: number of different data tokens, which are uniform.
    """

    num_tokens: int = 10
    delay: int = 100
    num_symbols: int = 8

    least: ClassVar = {"num_tokens": 1, "delay": 0, "num_symbols": 2}

    @property
    def vocab_size(self) -> int:
        return self.num_symbols + 2

    @property
    def length(self) -> int:
        return 2 * self.num_tokens + self.delay

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        data = draws.integers("data", self.num_tokens, self.num_symbols) + 1
        inputs = np.zeros((draws.num_examples, self.length), dtype=np.int64)
        inputs[:, : self.num_tokens] = data
        inputs[:, -self.num_tokens :] = self.num_symbols + 1
        return inputs, targets_at_end(inputs, data)

    def token_name(self, token_id: int) -> str:
        return {0: "_", self.num_symbols + 1: "?"}.get(token_id, str(token_id - 1))


@dataclass(frozen=True)
class SelectiveCopying(Task):
    """Data tokens at random steps among blanks, then one marker per data token, whose targets are the data in order.

    Source: Gu and Dao, "Mamba" (2024), section 4.1.1 and appendix E.1, as in Memora, section 5.1 and appendix F.1:
    episodes of 4096 steps with 16 numbers, V = 16. Ids: 0 is the blank, 1..V-2 are data, V-1 is the marker. Their
    steps are uniform over the `length` - `num_tokens` before the markers; data tokens are uniform and may repeat.

    Args:
        length: T, with the markers.
        num_tokens: number of data tokens.
        vocab_size: V.
    """

    length: int = 4096
    num_tokens: int = 16
    vocab_size: int = 16

    least: ClassVar = {"length": 2, "vocab_size": 3}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("num_tokens", self.num_tokens, 1, self.length // 2)

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        before = self.length - self.num_tokens
        data = draws.integers("data", self.num_tokens, self.vocab_size - 2) + 1
        inputs = np.zeros((draws.num_examples, self.length), dtype=np.int64)
        np.put_along_axis(inputs, draws.choose("places", before, self.num_tokens), data, axis=1)
        inputs[:, before:] = self.vocab_size - 1
        return inputs, targets_at_end(inputs, data)

    def token_name(self, token_id: int) -> str:
        return {0: "_", self.vocab_size - 1: "?"}.get(token_id, str(token_id))


@dataclass(frozen=True)
class SentinelCopy(Task):
    """A string, a sentinel, then the string again: each of its tokens is the target of the step before it.

    Source: Jelassi et al., "Repeat After Me" (2024), as in the survey's figure 20. The answer is read as it grows, so
    that a model whose targets are all right (`exact_match`) writes the string without an error in greedy decoding.

    Lengths of strings are uniform from `min_length` to `max_length`; after shorter ones the rest of the
    2 · `max_length` steps is empty. Letters are uniform. Ids: 0 for empty steps, 1..num_letters for letters, then the
    sentinel.

    Args:
        max_length: letters of the longest string.
        min_length: letters of the shortest one; None for strings of one length.
        num_letters: number of different letters.
    """

    max_length: int = 16
    min_length: int | None = None
    num_letters: int = 26

    least: ClassVar = {"max_length": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("num_letters", self.num_letters, 2, 26)
        if self.min_length is not None:
            check_integer("min_length", self.min_length, 1, self.max_length)

    @property
    def vocab_size(self) -> int:
        return self.num_letters + 2

    @property
    def length(self) -> int:
        return 2 * self.max_length

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        least = self.max_length if self.min_length is None else self.min_length
        lengths = least + draws.integers("length", 1, self.max_length - least + 1)
        string = draws.integers("string", self.max_length, self.num_letters) + 1
        after = np.arange(self.length) - lengths  # 0 at the sentinel
        first = np.pad(string, ((0, 0), (0, self.max_length)))
        again = np.take_along_axis(string, np.clip(after, 0, self.max_length - 1), axis=1)
        targets = np.where((after >= 0) & (after < lengths), again, IGNORE_INDEX)
        # Each token of the answer is the last step's target.
        answer = np.where((after > 0) & (after < lengths), np.roll(again, 1, axis=1), 0)
        inputs = np.where(after < 0, first, np.where(after == 0, self.num_letters + 1, answer))
        return inputs, targets

    def token_name(self, token_id: int) -> str:
        return {0: "_", self.num_letters + 1: "|"}.get(token_id, chr(ord("a") + token_id - 1))


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
