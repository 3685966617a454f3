"""The flip-flop language: write one bit, ignore others, read it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

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
