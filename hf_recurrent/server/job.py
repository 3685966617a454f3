"""A job: a text that the scheduler reads and continues, and its results, which another thread takes as they come.

Shape letters: T steps, V vocabulary.
"""

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hf_recurrent.server.sampling import TokenSource
from hf_recurrent.server.session import Session, Snapshot


class Scores:
    """Log-probabilities of successive tokens, and of the most likely tokens in the place of each.

    Args:
        count: how many of the most likely tokens.

    Attributes:
        log_probabilities: natural logarithms, before temperature, top_k and top_p; NaN where nothing was predicted.
        alternatives: for each token, the most likely ones, token to log-probability.
    """

    def __init__(self, count: int = 0):
        self._count = count
        self.log_probabilities = array("d")
        self.alternatives: list[dict[int, float]] = []

    def bits(self) -> list[float]:
        """The information of each token in bits; NaN where nothing was predicted."""
        return [value / -math.log(2) for value in self.log_probabilities]

    def add_unpredicted(self) -> None:
        """Add the first token of a text."""
        self.log_probabilities.append(math.nan)
        if self._count:
            self.alternatives.append({})

    def add(self, logits: torch.Tensor, tokens: Sequence[int]) -> None:
        """Add T tokens after their logits (T, V)."""
        found = logits.double().log_softmax(-1)
        self.log_probabilities.extend(found.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist())
        if self._count:
            best = found.topk(min(self._count, found.shape[1]))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            self.alternatives += [dict(zip(*pair, strict=True)) for pair in pairs]


@dataclass(eq=False)  # a job is equal to itself only
class Job:
    """Reads tokens after a place, then generates.

    The scheduler writes the results, another thread reads them: lists that only grow, and at the end `is_done`.

    Args:
        tokens: to read.
        session_id: the session to continue; None for a text of its own, which is forgotten.
        start: where a text of its own begins; empty by default.
        max_new_tokens: 0 only reads.
        source: how tokens are chosen; needed to generate.
        stops: sequences of tokens that end the text.
        scores: of the tokens to read, to be filled; None if nobody wants them.
        output_scores: of the generated tokens, likewise.
        seconds: the job ends after so many.
        wake: called by the scheduler, in its thread, when there are new results.

    Attributes:
        output: the generated tokens, without the end token.
        released: how many generated tokens are final: no stop sequence may begin with the others, and a session will
            have them after a crash.
        finish_reason: "stop" or "length".
        error: why the job failed.
    """

    tokens: np.ndarray
    session_id: str | None = None
    start: Snapshot | None = None
    max_new_tokens: int = 0
    source: TokenSource | None = None
    stops: Sequence[Sequence[int]] = ()
    scores: Scores | None = None
    output_scores: Scores | None = None
    seconds: float = 600.0
    wake: Callable[[], None] = lambda: None

    output: list[int] = field(default_factory=list)
    released: int = 0
    finish_reason: str | None = None
    error: Exception | None = None
    is_done: bool = False
    is_cancelled: bool = False

    # Of the scheduler.
    session: Session | None = None
    origin: Snapshot | None = None
    snapshot: Snapshot | None = None
    feed: np.ndarray | None = None
    fed: int = 0
    journaled: int = 0

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds

    def cancel(self) -> None:
        """Nobody waits for the results any more. A read of a session is then undone, a generation ends where it is."""
        self.is_cancelled = True

    def held_back(self) -> int:
        """How many of the last generated tokens may be the beginning of a stop sequence."""
        longest = max(map(len, self.stops), default=1) - 1
        for size in range(min(longest, len(self.output)), 0, -1):
            end = self.output[-size:]
            if any(len(stop) > size and list(stop[:size]) == end for stop in self.stops):
                return size
        return 0

    def matched_stop(self) -> int:
        """Length of the stop sequence with which the output ends; 0 if there is none."""
        return max((len(stop) for stop in self.stops if self.output[-len(stop) :] == list(stop)), default=0)
