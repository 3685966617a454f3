"""Selective copying: remember data tokens among blanks."""

from dataclasses import dataclass

import numpy as np

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.tasks.example_draws import ExampleDraws, check_integer
from hf_recurrent.tasks.task import Task


@dataclass(frozen=True)
class SelectiveCopying(Task):
    """Data tokens at random places among blanks, then one marker per data token, whose targets are the data in order.

    Source: Gu and Dao, "Mamba" (2024), section 4.1.1 and appendix E.1, as in Memora, section 5.1 and appendix F.1:
    episodes of 4096 steps with 16 numbers, V = 16. Ids: 0 is the blank, 1..V-2 are data, V-1 is the marker. Places are
    uniform over the `length` - `num_tokens` steps before the markers; data tokens are uniform and may repeat.

    Args:
        length: T, with the markers.
        num_tokens: number of data tokens.
        vocab_size: V.

    Raises:
        ValueError: fewer than 3 ids, or more tokens than fit into the length.
    """

    length: int = 4096
    num_tokens: int = 16
    vocab_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("vocab_size", self.vocab_size, 3)
        check_integer("length", self.length, 2)
        check_integer("num_tokens", self.num_tokens, 1, self.length // 2)

    def generate(self, draws: ExampleDraws) -> tuple[np.ndarray, np.ndarray]:
        before = self.length - self.num_tokens
        data = draws.integers("data", self.num_tokens, self.vocab_size - 2) + 1
        inputs = np.zeros((draws.num_examples, self.length), dtype=np.int64)
        np.put_along_axis(inputs, draws.choose("places", before, self.num_tokens), data, axis=1)
        inputs[:, before:] = self.vocab_size - 1
        targets = np.full_like(inputs, IGNORE_INDEX)
        targets[:, before:] = data
        return inputs, targets

    def token_name(self, token_id: int) -> str:
        return {0: "_", self.vocab_size - 1: "?"}.get(token_id, str(token_id))
