"""A visitor of the page: some texts, each a private session of the server with its transcript.

Everything runs through the jobs and the store that the HTTP API uses. A visitor's methods run in the event loop; long
ones are asynchronous generators, which yield when there is something new to show.
"""

import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from hf_recurrent.server.job import Job
from hf_recurrent.server.page.transcript import Transcript
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.running_jobs import RunningJobs, call
from hf_recurrent.server.routes.schemas import GenerateRequest
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.session import Session, Snapshot
from hf_recurrent.server.session_states import session_of_state, state_of_session
from hf_recurrent.server.session_store import SessionError

_MOST_TEXTS, _MOST_MARKS = 12, 24
MOST_VISITORS = 512
_IDLE_SECONDS, _BUSY_SECONDS = 3600, 300
_DRAW_SECONDS = 0.15  # between two drawings of a text that grows


@dataclass(eq=False)
class Text:
    """One text of a visitor.

    Args:
        transcript: of the text.
        session_id: of its session, which begins with the first byte.
        name: shown to the visitor.
        learns: the model learns from the text that is read.
        marks: transcripts at the marks of the session.
        marks_made: since the beginning, so that no name is used twice.
        last_mark: the last one that was set or used.
    """

    transcript: Transcript = field(default_factory=Transcript)
    session_id: str | None = None
    name: str = ""
    learns: bool = False
    marks: dict[str, Transcript] = field(default_factory=dict)
    marks_made: int = 0
    last_mark: str | None = None


class Visitor:
    """The texts of one visitor, one of which is in use.

    Attributes:
        texts: all of them.
        text: the one in use.
    """

    def __init__(self, served: ServedModel):
        self._served = served
        self._scheduler, self._store = served.scheduler, served.scheduler.store
        self.texts: list[Text] = []
        self._texts_made = 0
        self.begin()
        self._running: RunningJobs | None = None
        self._is_stopped = False
        self.last_used = time.monotonic()

    # ---- Events of the page: each returns or yields a sentence about its result, or none

    async def read(self, content: str, times: int = 1) -> AsyncIterator[str]:
        """Read a text, several times if it is to be learned.

        Raises:
            ApiError, SessionError, TimeIsUp: it cannot be read.
        """
        if not content:
            raise ApiError(400, "Write something first.")
        tokens, text = self._served.encode(content, "text"), self.text
        data, session_id = self._served.decode(tokens), await self._session(text)
        for done in range(1, times + 1):
            job = self._served.job(tokens, session_id=session_id, scores=0)
            async with aclosing(self._follow(job)) as updates:
                async for _ in updates:
                    pass
            if job.error is not None:
                raise ApiError(400, "Stopped; the text was not read.") if self._is_stopped else job.error
            text.transcript = text.transcript.add(data, job.scores.bits(), is_learned=text.learns)
            if self._is_stopped or done == times:
                yield "Read." if times == 1 else f"Read {done} times."
                return
            yield f"Read {done} of {times} times."

    async def generate(self, request: GenerateRequest) -> AsyncIterator[str]:
        """Continue the text.

        Raises:
            ApiError, SessionError, TimeIsUp: it cannot be continued.
        """
        text = self.text
        job = self._served.generation(request, await self._session(text), output_scores=0)
        before = text.transcript
        async with aclosing(self._follow(job)) as updates:
            async for _ in updates:
                if job.error is not None:
                    break
                count = job.released
                new = self._served.decode(job.output[:count])
                text.transcript = before.add(new, job.output_scores.bits()[:count], is_generated=True)
                yield "Writing …"
        if job.error is not None:
            text.transcript = before
            raise job.error
        has_ended = job.finish_reason == "stop"
        yield "The model ended its text; new text begins another one." if has_ended else ""

    async def read_and_generate(self, content: str, count: int, temperature: float) -> AsyncIterator[str]:
        """Read a text, if there is any, and continue it."""
        request = GenerateRequest(max_tokens=count, temperature=temperature)
        if content:
            async for _ in self.read(content):
                yield "Writing …"
        async for note in self.generate(request):
            yield note

    def stop(self) -> None:
        """End the running event: a generation ends where it is, a read is undone."""
        self._is_stopped = True
        if self._running is not None:
            self._running.cancel()

    async def mark(self) -> str:
        """Mark this place."""
        text = self.text
        if len(text.marks) >= _MOST_MARKS:
            raise ApiError(429, f"A text has at most {_MOST_MARKS} marks; fork it to set more.")
        session_id, number = await self._session(text), text.marks_made + 1
        await call(self._scheduler, self._store.set_mark, session_id, f"{number}")
        text.marks_made = number
        text.last_mark = f"{number}: after {text.transcript.curve.length:,} bytes"
        text.marks[text.last_mark] = text.transcript
        return f"Marked: {text.last_mark}."

    async def rewind(self, name: str) -> str:
        """Go back to a mark."""
        text = self.text
        if name not in text.marks:
            raise ApiError(404, "Choose a mark first.")
        await call(self._scheduler, self._store.rewind, text.session_id, name.partition(":")[0])
        text.transcript, text.last_mark = text.marks[name], name
        return f"Back at mark {name}."

    async def fork(self) -> str:
        """Continue with a copy of the text."""
        text = self.text
        self._check_texts()
        session = await call(self._scheduler, self._store.fork, await self._session(text))
        self._add(replace(text, session_id=session.id, marks=dict(text.marks)))
        return f"{self.text.name} is a copy of {text.name}."

    def begin(self) -> None:
        """Begin another text, empty."""
        self._check_texts()
        self._add(Text())

    def choose(self, name: str) -> None:
        """Switch to another text."""
        self.text = next((text for text in self.texts if text.name == name), self.text)

    async def load(self, data: bytes, name: str) -> str:
        """Begin a text that continues a state file."""
        self._check_texts()
        session = await call(self._scheduler, session_of_state, self._scheduler, data, "file", True)
        self._add(Text(Transcript(begins_with=name), session.id))
        return f"{self.text.name} continues {name}."

    async def set_learns(self, learns: bool) -> str:
        """Switch learning from the text on or off."""
        if learns and self._scheduler.learner is None:
            raise ApiError(400, "This server does not learn; start it with --learn.")
        await call(self._scheduler, self._store.set_learns, await self._session(self.text), learns)
        self.text.learns = learns
        return "The model learns from what this text reads." if learns else ""

    # ---- The rest

    async def save(self) -> bytes:
        """The content of a state file with the present text."""
        return await call(self._scheduler, state_of_session, self._scheduler, await self._session(self.text))

    async def leave(self) -> None:
        """Forget all texts."""
        self.stop()
        for text in self.texts:
            if text.session_id is not None:
                with suppress(SessionError, ApiError):
                    await call(self._scheduler, self._store.delete, text.session_id)

    async def _session(self, text: Text) -> str:
        if text.session_id is None:
            session = Session(Snapshot(self._store.zero), learns=text.learns, is_private=True)
            text.session_id = session.id
            try:
                await call(self._scheduler, self._store.add, session)
            except Exception:
                text.session_id = None
                raise
        return text.session_id

    def _check_texts(self) -> None:
        if len(self.texts) >= _MOST_TEXTS:
            raise ApiError(429, f"A visitor has at most {_MOST_TEXTS} texts; reload the page to begin anew.")

    def _add(self, text: Text) -> None:
        self._texts_made += 1
        text.name = f"Text {self._texts_made}"
        self.texts.append(text)
        self.text = text

    async def _follow(self, job: Job) -> AsyncIterator[None]:
        """Run a job; yields while it has new results, and at the end. The job's error is left to the caller."""
        self._is_stopped = False
        running = RunningJobs(self._scheduler, [job], is_streamed=True)
        await running.submit()
        self._running = running
        try:
            async with aclosing(running.updates(lambda: max(self._served.send_interval(), _DRAW_SECONDS))) as updates:
                async for _ in updates:
                    yield
        finally:
            self._running = None


class Visitors:
    """All visitors, by a random key that their browser has chosen."""

    def __init__(self, served: ServedModel):
        self._served = served
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._visitors)

    async def get(self, key: str | None, creates: bool = False) -> Visitor:
        """The visitor with this key, a new one if `creates`. Forgets visitors that were idle for an hour.

        Raises:
            ApiError: there is none, or the limit of visitors is reached.
        """
        now = time.monotonic()
        for old in [key for key, each in self._visitors.items() if now - each.last_used > _IDLE_SECONDS]:
            await self._forget(old)
        if not key or (key not in self._visitors and not creates):
            message = "The server has forgotten your texts: it was restarted, or the page was not used for an hour."
            raise ApiError(404, f"{message} Reload the page.")
        if key not in self._visitors:
            if len(self._visitors) >= MOST_VISITORS:
                oldest = next(iter(self._visitors))
                if now - self._visitors[oldest].last_used < _BUSY_SECONDS:
                    raise ApiError(429, "The page has too many visitors; try again later.")
                await self._forget(oldest)
            self._visitors[key] = Visitor(self._served)
        visitor = self._visitors[key]
        visitor.last_used = now
        self._visitors.move_to_end(key)
        return visitor

    def has_left(self, key: str) -> None:
        """Forget a visitor soon, who has closed the page or lost the connection for a moment."""
        if key in self._visitors:
            self._visitors[key].last_used -= _IDLE_SECONDS - _BUSY_SECONDS
            self._visitors.move_to_end(key, last=False)

    async def _forget(self, key: str) -> None:
        visitor = self._visitors.pop(key)
        await visitor.leave()
