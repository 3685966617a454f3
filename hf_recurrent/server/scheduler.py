"""The thread that owns model and sessions: it reads and generates for all of them together.

Continuous batching: all texts that generate are rows of one batch, and every tick is one step of that batch. Between
two steps, one slice of one text that is to be read is read. Whoever waits for results takes them from its job when it
likes, so that nobody waits for a slow reader.

Shape letters: B batch.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_recurrent.modeling.block.recurrent_state import RecurrentState, join_states, select_state
from hf_recurrent.server.job import Job
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.sampling import choose_tokens
from hf_recurrent.server.session import Session, Snapshot, after_end
from hf_recurrent.server.session_learner import SessionLearner
from hf_recurrent.server.session_store import NothingToContinue, SessionStore, TooMany

_log = logging.getLogger(__name__)
# Between two commits of what sessions have generated.
_COMMIT_SECONDS = 0.02
_MOST_CALLS = 64  # of other threads, between two ticks


@dataclass
class Counts:
    """Totals since the start, and the present number of jobs."""

    bytes_read: int = 0
    bytes_generated: int = 0
    ticks: int = 0
    waiting: int = 0
    reading: int = 0
    generating: int = 0
    failed: int = 0


class TimeIsUp(RuntimeError):
    """A job was not done in its time."""


class Scheduler:
    """Runs jobs until it is closed.

    Args:
        steps: the model.
        store: of the sessions.
        learner: learns from what sessions marked for it read; None for a model that does not change.
        begin_token: read at the beginning of an empty text before it is continued; None where there is none.
        end_tokens: those that end a text.
        max_rows: jobs that read or generate at a time; the others wait.
        max_jobs: jobs at a time, those that wait included.
        max_waiting_bytes: tokens to be read by all jobs together.
    """

    def __init__(
        self,
        steps: ModelSteps,
        store: SessionStore,
        *,
        learner: SessionLearner | None = None,
        begin_token: int | None = None,
        end_tokens: frozenset[int] = frozenset(),
        max_rows: int = 64,
        max_jobs: int = 512,
        max_waiting_bytes: int = 1 << 26,
    ):
        self.store, self.counts, self.learner = store, Counts(), learner
        self.steps, self._begin_token, self._end_tokens = steps, begin_token, end_tokens
        self._max_rows, self._max_jobs, self._max_waiting_bytes = max_rows, max_jobs, max_waiting_bytes
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._reading: deque[Job] = deque()
        # The batch: jobs, the next token of each, and their states (B, ...).
        self._rows: list[Job] = []
        self._tokens: list[int] = []
        self._state: RecurrentState = {}
        self._joining: list[tuple[Job, Snapshot]] = []
        self._last_commit = 0.0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    # ---- Called by other threads

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future:
        """Run a function in the thread of the scheduler, between two ticks."""
        future: Future = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def submit(self, job: Job) -> Future:
        """Begin a job; the future has a result once it is accepted.

        Raises, in the future:
            UnknownSession, SessionBusy: see those.
            TooMany: there are as many jobs as there may be.
            NothingToContinue: the text is empty.
        """
        return self.call(self._admit, job)

    def close(self) -> None:
        """End all jobs where they are, and the thread."""
        self.call(self._close)
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """False if the thread has ended."""
        return self._thread.is_alive() and not self._is_closing

    # ---- The thread

    def _run(self) -> None:
        with torch.no_grad():
            while not self._is_closing:
                self._take_calls()
                try:
                    self._tick()
                except Exception as error:  # of the batch as a whole, such as a failed allocation
                    _log.exception("A step of the batch failed.")
                    for job in self._all_jobs():
                        self._fail(job, error)

    def _take_calls(self) -> None:
        """Run what other threads have asked for; wait for it if there is nothing else to do."""
        if not (self._waiting or self._reading or self._rows or self._joining):
            self._inbox.get()()
        for _ in range(_MOST_CALLS):
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _close(self) -> None:
        self._is_closing = True
        for job in self._all_jobs():
            job.cancel()
        self._drop_ended()
        self.store.close()

    def _all_jobs(self) -> list[Job]:
        return [*self._waiting, *self._reading, *(job for job, _ in self._joining), *self._rows]

    def _admit(self, job: Job) -> None:
        to_read = sum(len(other.tokens) for other in (*self._waiting, *self._reading, job))
        if len(self._all_jobs()) >= self._max_jobs or to_read > self._max_waiting_bytes:
            raise TooMany("The server is busy: too many requests wait; try again later.")
        snapshot = job.start or Snapshot(self.store.zero)
        if job.session_id is not None:
            job.session = self.store.acquire(job.session_id)
            snapshot = job.session.snapshot
        if not len(job.tokens) and snapshot.pending is None and job.max_new_tokens:
            if self._begin_token is None:
                if job.session is not None:
                    self.store.release(job.session, snapshot)
                raise NothingToContinue("There is no text to continue, and this model has no end byte to begin with.")
            snapshot = replace(snapshot, pending=self._begin_token)
        # Of the tokens to read, the last one becomes the pending one.
        first = [] if snapshot.pending is None or not len(job.tokens) else [snapshot.pending]
        job.feed = np.concatenate([first, job.tokens[:-1]]).astype(np.int64)
        job.origin = job.snapshot = snapshot
        self._waiting.append(job)

    def _tick(self) -> None:
        self._drop_ended()
        while self._waiting and len(self._reading) + len(self._rows) + len(self._joining) < self._max_rows:
            self._reading.append(self._waiting.popleft())
        if self._reading:
            job = self._reading.popleft()
            try:
                self._read_slice(job)
            except Exception as error:
                self._fail(job, error)
        if self._joining:
            self._join()
        if self._rows:
            self._step()
        self._commit()
        self.counts.ticks += 1
        self.counts.waiting, self.counts.reading = len(self._waiting), len(self._reading)
        self.counts.generating = len(self._rows) + len(self._joining)

    # ---- Reading

    def _read_slice(self, job: Job) -> None:
        """Feed the next tokens of a text; the job is then read, goes on later, or generates."""
        before, begin = job.snapshot, job.fed
        piece = job.feed[begin : begin + self._slice_length(job)].tolist()
        job.fed += len(piece)
        # A text without a pending token knows its first token before any was fed.
        ahead = len(job.tokens) - len(job.feed)
        new = job.tokens[begin + ahead if begin else 0 : job.fed + ahead].tolist()
        state = before.state
        if job.scores is not None and len(new) > len(piece):
            job.scores.add_unpredicted()
        if piece:
            logits, state = self.steps.read(piece, state)
            if job.scores is not None:
                job.scores.add(logits, new[-len(piece) :])
        if new:
            job.snapshot = Snapshot(state, new[-1], before.bytes_read + len(new))
            self.counts.bytes_read += len(new)
            if self._is_learned(job):
                self.learner.read(job.session.id, before, new)
        if job.fed < len(job.feed):
            self._reading.append(job)
        elif job.max_new_tokens:
            self._joining.append((job, job.snapshot))
        else:
            self._finish(job, job.snapshot)

    def _slice_length(self, job: Job) -> int:
        return self.learner.slice_length if self._is_learned(job) else self.steps.slice_length

    def _is_learned(self, job: Job) -> bool:
        return self.learner is not None and job.session is not None and job.session.learns

    # ---- Generating

    def _join(self) -> None:
        """The texts that have been read become rows of the batch."""
        states = [snapshot.state for _, snapshot in self._joining]
        self._state = join_states([*([self._state] if self._rows else []), *states])
        self._rows += [job for job, _ in self._joining]
        self._tokens += [snapshot.pending for _, snapshot in self._joining]
        self._joining = []

    def _step(self) -> None:
        """One token of every row."""
        logits, self._state = self.steps.step(self._tokens, self._state)
        chosen = choose_tokens(logits, [job.source for job in self._rows])
        self.counts.bytes_generated += len(chosen)
        ended: dict[int, str] = {}
        for row, (job, token) in enumerate(zip(self._rows, chosen, strict=True)):
            if token is None:
                self._fail(job, RuntimeError("The model's probabilities are NaN."), leave=False)
                ended[row] = "failed"
                continue
            if token in self._end_tokens:
                ended[row] = "end"
                continue
            if job.output_scores is not None:
                job.output_scores.add(logits[row : row + 1], [token])
            self._tokens[row] = token
            job.output.append(token)
            if job.stops and job.matched_stop():
                ended[row] = "stop"
            elif len(job.output) >= job.max_new_tokens:
                ended[row] = "length"
        if ended:
            for row, reason in ended.items():
                if reason != "failed":
                    self._end_row(row, reason)
            self._keep([row for row in range(len(self._rows)) if row not in ended])

    def _end_row(self, row: int, reason: str) -> None:
        job, snapshot = self._rows[row], self._row_snapshot(row)
        if reason == "end":
            snapshot = after_end(snapshot, self.store.zero)
        job.finish_reason = "length" if reason == "length" else "stop"
        self._finish(job, snapshot, len(job.output) - (job.matched_stop() if reason == "stop" else 0))

    def _row_snapshot(self, row: int) -> Snapshot:
        job = self._rows[row]
        bytes_read = job.snapshot.bytes_read + len(job.output)
        return Snapshot(select_state(self._state, row), self._tokens[row], bytes_read)

    def _keep(self, rows: list[int]) -> None:
        self._state = select_state(self._state, rows) if rows else {}
        self._rows, self._tokens = [self._rows[row] for row in rows], [self._tokens[row] for row in rows]

    def _commit(self) -> None:
        """Release what was generated; what sessions generated is made durable first."""
        now = time.monotonic()
        is_due = now - self._last_commit >= _COMMIT_SECONDS
        durable: list[tuple[Session, list[int], Callable[[], Snapshot]]] = []
        released: list[Job] = []
        for row, job in enumerate(self._rows):
            if job.session is None:
                released.append(job)
            elif is_due:
                durable.append((job.session, job.output[job.journaled :], lambda row=row: self._row_snapshot(row)))
                released.append(job)
        if is_due:
            self._last_commit = now
        if durable:
            try:
                self.store.journal(durable)
            except Exception as error:
                for job in [job for job in released if job.session is not None]:
                    self._fail(job, error)
        for job in released:
            job.journaled = len(job.output)
            job.released = len(job.output) - (job.held_back() if job.stops else 0)
            job.wake()

    # ---- Ends of jobs

    def _drop_ended(self) -> None:
        """Take leave of jobs that nobody waits for or whose time is up."""
        now = time.monotonic()
        for jobs in (self._waiting, self._reading):
            for job in [job for job in jobs if job.is_cancelled or now > job.deadline]:
                jobs.remove(job)
                self._fail(job, TimeIsUp("The time for this request is up; it was not read."), leave=False)
        for place in [n for n, (job, _) in enumerate(self._joining) if job.is_cancelled][::-1]:
            job, snapshot = self._joining.pop(place)
            self._finish(job, snapshot)
        ended = [row for row, job in enumerate(self._rows) if job.is_cancelled or now > job.deadline]
        for row in ended:
            self._end_row(row, "length")
        if ended:
            self._keep([row for row in range(len(self._rows)) if row not in ended])

    def _finish(self, job: Job, snapshot: Snapshot, released: int | None = None) -> None:
        """The job has ended, at this place of its text."""
        if job.session is not None:
            try:
                self.store.release(job.session, snapshot)
            except Exception as error:
                job.error = error
                self.counts.failed += 1
        job.snapshot = snapshot
        job.released = len(job.output) if released is None else released
        job.is_done = True
        job.wake()

    def _fail(self, job: Job, error: Exception, leave: bool = True) -> None:
        """The job has failed; its session is where it was before it."""
        if job.is_done:
            return
        if leave:
            self._remove(job)
        if job.session is not None:
            try:
                self.store.release(job.session, job.origin)
            except Exception:
                _log.exception("A session could not be written.")
        self.counts.failed += not job.is_cancelled
        job.error, job.is_done = error, True
        job.wake()

    def _remove(self, job: Job) -> None:
        for jobs in (self._waiting, self._reading):
            if job in jobs:
                jobs.remove(job)
        self._joining = [pair for pair in self._joining if pair[0] is not job]
        if job in self._rows:
            self._keep([row for row, other in enumerate(self._rows) if other is not job])
