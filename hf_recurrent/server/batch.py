"""The texts that a scheduler works on, the queue of waiting ones, and the batch of the generating ones.

Shape letters: B batch, V vocabulary.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest

import numpy as np
import torch

from hf_recurrent.modeling.block.recurrent_state import RecurrentState, join_states, select_state
from hf_recurrent.server.adapters import ADAPTER, take_adapter
from hf_recurrent.server.job import Job
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.sampling import choose_tokens
from hf_recurrent.server.session import Session, Snapshot
from hf_recurrent.server.text_hashes import PrefixKey


@dataclass(eq=False)
class Progress:
    """The progress of a job."""

    job: Job
    session: Session | None  # of the job, acquired; None for a new text
    origin: Snapshot  # the text before the job, which a failed job restores
    snapshot: Snapshot  # the text after the tokens that were read, or where its last turn in the batch ended
    fed: int = 0  # how many tokens of `feed` the model has read
    generated: int = 0  # how many generated tokens `snapshot` has
    journaled: int = 0  # how many generated tokens are durable
    turn_began: float = 0.0  # time at which the text joined the batch
    # Where states are to be stored while the text is read, in order; a slice ends there.
    keep_at: deque[PrefixKey] = field(default_factory=deque)
    # How many generated tokens came before what may be a stop sequence, and the state after them.
    before_stop: tuple[int, RecurrentState] | None = None

    def __post_init__(self) -> None:
        # Of the tokens to read, the last one becomes the pending one.
        tokens, pending = self.job.request.tokens, self.snapshot.pending
        first = [] if pending is None or not len(tokens) else [pending]
        self.feed = np.concatenate([first, tokens[:-1]]).astype(np.int64)

    @property
    def learns(self) -> bool:
        """True if the model learns from the text that is read."""
        return self.session is not None and self.session.learns

    def next_slice(self, length: int) -> tuple[list[int], list[int]]:
        """The next tokens to feed, and the tokens of the request that are known after them."""
        begin = self.fed
        if self.keep_at:
            length = min(length, self.keep_at[0].length - begin)
        piece = self.feed[begin : begin + length].tolist()
        self.fed += len(piece)
        # A text without a pending token has its first token before any was fed.
        tokens = self.job.request.tokens
        ahead = len(tokens) - len(self.feed)
        return piece, tokens[begin + ahead if begin else 0 : self.fed + ahead].tolist()

    def skip_to(self, length: int, state: RecurrentState) -> int:
        """Go to the state after the first tokens of a new text; returns how many of them had not been read."""
        skipped, self.fed = length - self.fed, length
        self.snapshot = Snapshot(state, int(self.job.request.tokens[length]), self.origin.bytes_read + length + 1)
        return skipped


class _JoinedStates:
    """States of B rows as one state, for a model that takes them together."""

    def __init__(self, steps: ModelSteps):
        self._steps = steps
        self._state: RecurrentState = {}  # (B, ...)
        self._adapters: list[torch.Tensor | None] = []  # they do not change while a text is generated

    def add(self, states: Sequence[RecurrentState]) -> None:
        rests, adapters = zip(*map(take_adapter, states), strict=True)
        self._state = join_states([*([self._state] if self._state else []), *rests])
        self._adapters += adapters

    def step(self, tokens: Sequence[int], are_sampled: Sequence[bool]) -> torch.Tensor:
        """Logits (B, V) after the next token of each row."""
        own = {"adapters": self._adapters} if any(each is not None for each in self._adapters) else {}
        logits, self._state = self._steps.step(tokens, self._state, are_sampled, **own)
        return logits

    def row(self, row: int) -> RecurrentState:
        return self._with_adapter(select_state(self._state, row), row)

    def rows(self, rows: Collection[int]) -> list[RecurrentState]:
        """Views: copies of single rows cost as much as several steps."""
        parts = {name: part.split(1) for name, part in self._state.items()}
        return [self._with_adapter({name: views[row] for name, views in parts.items()}, row) for row in rows]

    def keep(self, rows: Sequence[int]) -> None:
        self._state = select_state(self._state, rows) if rows else {}
        self._adapters = [self._adapters[row] for row in rows]

    def _with_adapter(self, state: RecurrentState, row: int) -> RecurrentState:
        return state if self._adapters[row] is None else state | {ADAPTER: self._adapters[row]}


class _SeparateStates:
    """A state for each row, for a model that takes one text at a time; methods as above."""

    def __init__(self, steps: ModelSteps):
        self._steps = steps
        self._states: list[RecurrentState] = []

    def add(self, states: Sequence[RecurrentState]) -> None:
        self._states += states

    def step(self, tokens: Sequence[int], are_sampled: Sequence[bool]) -> torch.Tensor:
        found = [
            self._steps.step([token], state, [sampled])
            for token, state, sampled in zip(tokens, self._states, are_sampled, strict=True)
        ]
        self._states = [state for _, state in found]
        return torch.cat([logits for logits, _ in found])

    def row(self, row: int) -> RecurrentState:
        return self._states[row]

    def rows(self, rows: Collection[int]) -> list[RecurrentState]:
        return [self._states[row] for row in rows]

    def keep(self, rows: Sequence[int]) -> None:
        self._states = [self._states[row] for row in rows]


class Batch:
    """Texts that generate, one row each: all of them take a step together, or one after another."""

    def __init__(self, steps: ModelSteps):
        self.rows: list[Progress] = []
        self._tokens: list[int] = []  # the next one to feed of each row
        self._states = _JoinedStates(steps) if steps.is_batched else _SeparateStates(steps)

    def add(self, new: Sequence[Progress]) -> None:
        """Add texts that have been read, or whose turn begins again."""
        self._states.add([progress.snapshot.state for progress in new])
        self.rows += new
        self._tokens += [progress.snapshot.pending for progress in new]

    def step(self) -> tuple[torch.Tensor, list[int | None]]:
        """Logits (B, V) and the next token of every row; None where the probabilities are NaN."""
        # The first token of a generation was read; the others are the model's own.
        are_sampled = [bool(progress.job.output) for progress in self.rows]
        logits = self._states.step(self._tokens, are_sampled)
        self._tokens = choose_tokens(logits, [progress.job.request.source for progress in self.rows])
        return logits, self._tokens

    def state(self, row: int) -> RecurrentState:
        """The present state of a row, without its next token."""
        return self._states.row(row)

    def snapshot(self, row: int) -> Snapshot:
        """The present text of a row."""
        return Snapshot(self.state(row), self._tokens[row], self._bytes_read(row))

    def end_turns(self, rows: Collection[int]) -> list[Progress]:
        """Remove rows that will go on later; returns their texts."""
        ended = [self.rows[row] for row in rows]
        for row, progress, state in zip(rows, ended, self._states.rows(rows), strict=True):
            progress.snapshot = Snapshot(state, self._tokens[row], self._bytes_read(row))
            progress.generated = len(progress.job.output)
        self.remove(rows)
        return ended

    def remove(self, rows: Collection[int]) -> None:
        if not rows:
            return
        kept = [row for row in range(len(self.rows)) if row not in rows]
        self._states.keep(kept)
        self.rows, self._tokens = [self.rows[row] for row in kept], [self._tokens[row] for row in kept]

    def _bytes_read(self, row: int) -> int:
        progress = self.rows[row]
        return progress.snapshot.bytes_read + len(progress.job.output) - progress.generated


class FairQueue:
    """Jobs, each owner's in the order of their arrival, and the owners in turn."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Progress]] = OrderedDict()  # the next owner first

    def __iter__(self) -> Iterator[Progress]:
        return (progress for queue in self._queues.values() for progress in queue)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def append(self, progress: Progress) -> None:
        self._queues.setdefault(progress.job.request.owner, deque()).append(progress)

    def remove(self, progress: Progress) -> None:
        """Take a job out; its owner's turn comes after the others'."""
        owner = progress.job.request.owner
        self._queues[owner].remove(progress)
        if self._queues[owner]:
            self._queues.move_to_end(owner)
        else:
            del self._queues[owner]

    def first(self, count: int) -> list[Progress]:
        """The next jobs, which stay."""
        rounds = zip_longest(*self._queues.values())
        return list(islice((progress for turn in rounds for progress in turn if progress is not None), count))

    def popleft(self) -> Progress:
        """Take the next job out."""
        (progress,) = self.first(1)
        self.remove(progress)
        return progress
