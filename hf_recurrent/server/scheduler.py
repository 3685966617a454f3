"""The thread that owns model and sessions: it reads and generates for all of them together.

Continuous batching: texts that generate are rows of one batch, and every tick is one step of that batch; more texts
than rows take turns. Between two steps, one slice of one text that is to be read is read, or several short texts.
Results are buffered in the job, so that a slow client delays no other one.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hf_recurrent.server.adapters import ADAPTER
from hf_recurrent.server.batch import Batch, FairQueue, Progress
from hf_recurrent.server.job import Job
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.prefix_reuse import PrefixReuse
from hf_recurrent.server.response_store import ResponseStore
from hf_recurrent.server.session import Snapshot
from hf_recurrent.server.session_learner import SessionLearner
from hf_recurrent.server.session_store import NothingToContinue, SessionStore, Stopped, TooMany

_log = logging.getLogger(__name__)
# Between two commits of generated tokens of sessions.
_COMMIT_SECONDS = 0.02
# Of a row while others wait for one. Changing rows costs as much as a step.
_TURN_SECONDS = 0.08
_MOST_CALLS = 64  # of other threads, between two ticks
_MOST_WAITING = 1 << 26  # tokens to be read by all jobs together
_TOO_LATE = "The time for this request is up; it was not read."


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


@dataclass(eq=False)
class Scheduler:
    """Runs jobs until it is closed."""

    steps: ModelSteps
    store: SessionStore
    reuse: PrefixReuse | None = None  # of states of earlier texts; None to read each text from its beginning
    learner: SessionLearner | None = None  # from the text that sessions marked for it read
    responses: ResponseStore | None = None  # only kept here for the routes
    begin_token: int | None = None  # read at the beginning of an empty text before it is continued
    end_tokens: frozenset[int] = frozenset()  # that end a text
    max_rows: int = 128  # texts that generate at a time; more take turns
    max_jobs: int = 512

    def __post_init__(self) -> None:
        self.counts = Counts()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # A job goes from one to the next.
        self._reading = FairQueue()
        self._waiting = FairQueue()  # for a row
        self._batch = Batch(self.steps)
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
        """Begin a job; the future has a result once it is accepted, or the error of why it is not."""
        return self.call(self._admit, job)

    def stop(self, session_id: str) -> bool:
        """Cancel the job of a session; False if it has none. Runs in the thread of the scheduler, by [`call`]."""
        self.store.get(session_id)
        jobs = [each.job for each in self._all_jobs() if each.session is not None and each.session.id == session_id]
        for job in jobs:
            job.cancel()
        return bool(jobs)

    def end_all(self) -> Future:
        """Cancel all jobs: a generation ends where it is."""
        return self.call(lambda: [progress.job.cancel() for progress in self._all_jobs()])

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
                    failed = self._all_jobs()
                    self._reading, self._waiting = FairQueue(), FairQueue()
                    self._batch = Batch(self.steps)
                    for progress in failed:
                        self._fail(progress, error)

    def _take_calls(self) -> None:
        """Run the calls of other threads; wait for one if there is no job."""
        if not (self._reading or self._waiting or self._batch.rows):
            self._inbox.get()()
        for _ in range(_MOST_CALLS):
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _close(self) -> None:
        self._is_closing = True
        for progress in self._all_jobs():
            progress.job.cancel()
        self._drop_ended()
        self.store.close()
        if self.reuse is not None:
            self.reuse.close()

    def _all_jobs(self) -> list[Progress]:
        return [*self._reading, *self._waiting, *self._batch.rows]

    def _admit(self, job: Job) -> None:
        request = job.request
        to_read = len(request.tokens) + sum(len(other.job.request.tokens) for other in self._reading)
        if len(self._all_jobs()) >= self.max_jobs or to_read > _MOST_WAITING:
            raise TooMany("The server is busy: too many requests wait; try again later.")
        session = None if request.session_id is None else self.store.acquire(request.session_id)
        origin = session.snapshot if session else request.start or Snapshot(self.store.zero)
        if not len(request.tokens) and origin.pending is None and request.max_new_tokens:
            if self.begin_token is None:
                if session is not None:
                    self.store.release(session, origin)
                raise NothingToContinue("There is no text to continue, and this model has no end byte to begin with.")
            origin = replace(origin, pending=self.begin_token)
            job.prefix = [self.begin_token]
            request.source.read(job.prefix)
        progress = Progress(job, session, origin, origin)
        if self.reuse is not None:
            self.reuse.begin(progress)
        self._reading.append(progress)

    def _tick(self) -> None:
        self._drop_ended()
        self._read()
        self._fill_rows()
        if self._batch.rows:
            self._step()
        self._commit()
        self.counts.ticks += 1
        self.counts.waiting, self.counts.reading = len(self._waiting), len(self._reading)
        self.counts.generating = len(self._batch.rows)

    def _read(self) -> None:
        """Read a slice of one text, or several short texts."""
        left = (self.learner or self.steps).slice_length
        while self._reading and left > 0:
            progress = self._reading.popleft()
            before = progress.fed
            try:
                if self.reuse is None or self.reuse.may_read(progress):
                    self._read_slice(progress)
                else:
                    self._reading.append(progress)
            except Exception as error:
                self._fail(progress, error)
            left -= max(progress.fed - before, 1)

    def _fill_rows(self) -> None:
        free = min(self.max_rows - len(self._batch.rows), len(self._waiting))
        if free > 0:
            new, now = self._waiting.first(free), time.monotonic()
            for progress in new:
                progress.turn_began = now
            self._batch.add(new)
            for progress in new:  # waiting until they are rows, so that an error in between reaches their clients
                self._waiting.remove(progress)

    def _end_turns(self, now: float) -> None:
        """Make room for texts that wait; all generated tokens must be durable."""
        over = [row for row, each in enumerate(self._batch.rows) if now - each.turn_began >= _TURN_SECONDS]
        missing = len(self._waiting) - (self.max_rows - len(self._batch.rows))
        if over and missing > 0:
            over.sort(key=lambda row: self._batch.rows[row].turn_began)
            for progress in self._batch.end_turns(over[:missing]):
                self._waiting.append(progress)

    def _read_slice(self, progress: Progress) -> None:
        """Feed the next tokens of a text; the job then continues reading, generates, or is done."""
        before, scores = progress.snapshot, progress.job.scores
        learner = self.learner if progress.learns else None
        piece, new = progress.next_slice((learner or self.steps).slice_length)
        state = before.state
        if scores is not None and len(new) > len(piece):
            scores.add_unpredicted()
        if piece:
            adapts = progress.learns and learner is None and self.steps.adapter is not None
            own = {"targets": new[-len(piece) :]} if adapts else {}
            logits, state = self.steps.read(piece, state, **own)
            if scores is not None:
                scores.add(logits, new[-len(piece) :])
        if new:
            progress.snapshot = Snapshot(state, new[-1], before.bytes_read + len(new))
            self.counts.bytes_read += len(new)
            if learner is not None:
                learner.read(progress.session.id, before, new)
        if self.reuse is not None:
            self.reuse.after_slice(progress)
        if progress.fed < len(progress.feed):
            self._reading.append(progress)
        elif progress.job.request.max_new_tokens:
            self._waiting.append(progress)
        else:
            self._finish(progress, progress.snapshot)

    def _step(self) -> None:
        """Generate one token of every row."""
        logits, chosen = self._batch.step()
        self.counts.bytes_generated += len(chosen)
        ended = set()
        for row, (progress, token) in enumerate(zip(self._batch.rows, chosen, strict=True)):
            job = progress.job
            if token is None:
                self._fail(progress, RuntimeError("The probabilities are NaN, or the constraint has no match."))
                ended.add(row)
            elif token in self.end_tokens or job.request.source.has_ended:
                self._end_row(row, "end")
                ended.add(row)
            else:
                if job.output_scores is not None:
                    job.output_scores.add(logits[row : row + 1], [token])
                job.output.append(token)
                if self.reuse is not None and job.request.stops:
                    self.reuse.after_step(progress, partial(self._batch.state, row))
                stop, tail = job.request.matched_stop(job.output) if job.request.stops else (0, b"")
                if stop or len(job.output) >= job.request.max_new_tokens:
                    self._end_row(row, "stop" if stop else "length", stop, tail)
                    ended.add(row)
        self._batch.remove(ended)

    def _end_row(self, row: int, reason: str, stop: int = 0, tail: bytes = b"") -> None:
        """Finish the job of a row, which the caller removes; its last `stop` tokens are `tail` and a stop string."""
        progress, snapshot = self._batch.rows[row], self._batch.snapshot(row)
        job = progress.job
        job.tail = tail
        if self.reuse is not None:
            self.reuse.end(progress, snapshot.state, reason == "end", stop)
        if reason == "end" and self.steps.keeps_state_at_end:  # the end token is part of the text
            snapshot = replace(snapshot, bytes_read=snapshot.bytes_read + 1)
        elif reason == "end":  # a new episode begins with a zero state; an adapter is of the session
            lasting = {name: part for name, part in snapshot.state.items() if name == ADAPTER}
            snapshot = replace(snapshot, state=self.store.zero | lasting, pending=None)
        job.finish_reason = "length" if reason == "length" else "stop"
        self._finish(progress, snapshot, len(job.output) - stop)

    def _commit(self) -> None:
        """Release generated tokens; tokens of sessions are made durable first."""
        now = time.monotonic()
        is_due = now - self._last_commit >= _COMMIT_SECONDS
        if is_due:
            self._last_commit = now
        is_held = self.store.database is not None and not is_due
        released = [progress for progress in self._batch.rows if progress.session is None]
        rows = {row: each for row, each in enumerate(self._batch.rows) if each.session is not None and not is_held}
        try:
            self.store.journal(
                (progress.session, progress.job.output[progress.journaled :], partial(self._batch.snapshot, row))
                for row, progress in rows.items()
            )
            released += rows.values()
        except Exception as error:
            for progress in rows.values():
                self._fail(progress, error)
            self._batch.remove(rows)
        for progress in released:
            job = progress.job
            progress.journaled = len(job.output)
            job.released = len(job.output) - (job.request.held_back(job.output) if job.request.stops else 0)
            job.wake()
        if is_due:
            self._end_turns(now)

    # ---- Ends of jobs

    def _drop_ended(self) -> None:
        """Drop cancelled and expired jobs."""
        now = time.monotonic()
        for progress in [progress for progress in self._reading if progress.job.is_over(now)]:
            self._reading.remove(progress)
            is_stopped = progress.job.is_cancelled and not self._is_closing
            error = Stopped("Stopped: nothing of the text was read.") if is_stopped else TimeIsUp(_TOO_LATE)
            self._fail(progress, error)
        for progress in [progress for progress in self._waiting if progress.job.is_over(now)]:
            self._waiting.remove(progress)
            progress.job.finish_reason = "length"
            state = {name: part.clone() for name, part in progress.snapshot.state.items()}  # may be a view of a batch
            self._finish(progress, replace(progress.snapshot, state=state), len(progress.job.output))
        ended = [row for row, progress in enumerate(self._batch.rows) if progress.job.is_over(now)]
        for row in ended:
            self._end_row(row, "length")
        self._batch.remove(ended)

    def _finish(self, progress: Progress, snapshot: Snapshot, released: int = 0) -> None:
        """End a job with its text at a snapshot."""
        job = progress.job
        if progress.session is not None:
            try:
                self.store.release(progress.session, snapshot)
            except Exception as error:
                job.error = error
                self.counts.failed += 1
        job.snapshot, job.released = snapshot, released
        job.is_done = True
        job.wake()

    def _fail(self, progress: Progress, error: Exception) -> None:
        """End a job with an error; its session is as before."""
        job = progress.job
        if self.reuse is not None:
            self.reuse.drop(progress)
        if progress.session is not None:
            try:
                self.store.release(progress.session, progress.origin)
            except Exception:
                _log.exception("A session could not be written.")
        self.counts.failed += not job.is_cancelled
        job.error, job.is_done = error, True
        job.wake()
