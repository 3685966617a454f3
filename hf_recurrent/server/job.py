"""A job: a text that the scheduler reads and continues. Another thread takes its results as they come.

Shape letters: T steps, V vocabulary.
"""

import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.server.sampling import TokenSource
from hf_recurrent.server.session import Snapshot
from hf_recurrent.server.text_hashes import TextHashes


class Scores:
    """Log-probabilities of successive tokens, and of `count` most likely tokens at each position.

    They are natural logarithms, before temperature, top_k and top_p; NaN where nothing was predicted.
    """

    def __init__(self, count: int = 0):
        self._count = count
        self.log_probabilities = array("d")
        self.alternatives: list[dict[int, float]] = []  # for each token, the most likely ones

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


@dataclass(frozen=True, eq=False)
class Request:
    """Tokens to read, and the text to generate after them."""

    tokens: np.ndarray
    session_id: str | None = None  # the session to continue; None for a new text, which is forgotten
    start: Snapshot | None = None  # beginning of a new text; empty by default
    max_new_tokens: int = 0  # 0 only reads
    source: TokenSource | None = None  # how tokens are chosen; needed to generate
    stops: Sequence[bytes] = ()  # they end the text; they may begin and end inside of tokens
    token_bytes: Callable[[int], bytes] = lambda token: bytes([token])
    scores: int | None = None  # how many alternatives to list for each token that is read; None for no scores
    output_scores: int | None = None  # the same for generated tokens
    seconds: float = 600.0  # time limit of the job
    # Of a new text up to its first generated token: states are found and stored under them; None to do neither.
    text: TextHashes | None = None
    known: tuple[int, RecurrentState] | None = None  # a length, and the state after this many tokens of the text
    owner: str = ""  # the client; owners share reading and rows equally, however many jobs each has

    def held_back(self, output: Sequence[int]) -> int:
        """Number of the last generated tokens in which a stop string may begin."""
        longest = max(map(len, self.stops), default=1) - 1
        pieces = self._end(output, longest)
        text = b"".join(pieces)
        for size in range(min(longest, len(text)), 0, -1):
            if any(len(stop) > size and text.endswith(stop[:size]) for stop in self.stops):
                return _count_from(pieces, len(text) - size)
        return 0

    def matched_stop(self, output: Sequence[int]) -> tuple[int, bytes]:
        """The stop string that the last generated token has completed.

        Returns:
            How many tokens it is part of, 0 if there is none, and the bytes of the first of them that come before it.
        """
        longest = max(map(len, self.stops), default=0)
        if not longest or not output:
            return 0, b""
        before = self._end(output[:-1], longest - 1)
        pieces, known = [*before, self.token_bytes(output[-1])], sum(map(len, before))
        text = b"".join(pieces)
        found = [text.find(stop, max(known - len(stop) + 1, 0)) for stop in self.stops]
        begin = min((place for place in found if place >= 0), default=None)
        if begin is None:
            return 0, b""
        count = _count_from(pieces, begin)
        return count, text[sum(map(len, pieces[:-count])) : begin]

    def _end(self, output: Sequence[int], least: int) -> list[bytes]:
        """The bytes of each of the last tokens, which together have at least `least`."""
        pieces: list[bytes] = []
        size = 0
        for token in reversed(output):
            if size >= least:
                break
            pieces.insert(0, self.token_bytes(token))
            size += len(pieces[0])
        return pieces


def _count_from(pieces: Sequence[bytes], begin: int) -> int:
    """Number of the last pieces, from the one that has the byte `begin` of all."""
    return len(pieces) - bisect_right([*accumulate(map(len, pieces))], begin)


class Job:
    """A request and its results. The scheduler writes them, another thread reads them: `is_done` is set last."""

    def __init__(self, request: Request):
        self.request = request
        self.prefix: list[int] = []  # the end token, if the model read it because the text was empty
        self.cached_tokens = 0  # that were not read, because a state after them was stored
        self.wake: Callable[[], None] = lambda: None  # called in the scheduler's thread when there are new results
        # These only grow.
        self.scores = None if request.scores is None else Scores(request.scores)
        self.output: list[int] = []  # the generated tokens, without the end token
        self.output_scores = None if request.output_scores is None else Scores(request.output_scores)
        # So many generated tokens are final: no stop string may begin in them, and a session has them after a crash.
        self.released = 0
        self.tail = b""  # between the last released token and a stop string that begins inside of the next one
        self.finish_reason: str | None = None  # "stop" or "length"
        self.snapshot: Snapshot | None = None  # the text at the end of the job
        # A length, and the state after this many tokens of prompt and output, as if all had been read.
        self.known: tuple[int, RecurrentState] | None = None
        self.error: Exception | None = None
        self.is_done = self.is_cancelled = False
        self._deadline = time.monotonic() + request.seconds

    def cancel(self) -> None:
        """Nobody waits for the results any more. A read of a session is undone, a generation ends where it is."""
        self.is_cancelled = True

    def is_over(self, now: float) -> bool:
        """True for a cancelled or expired job."""
        return self.is_cancelled or now > self._deadline
