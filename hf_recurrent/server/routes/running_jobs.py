"""Jobs of one request, awaited by the event loop while the scheduler works on them in its thread."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from hf_recurrent.server.job import Job
from hf_recurrent.server.routes.errors import ApiError, error_body
from hf_recurrent.server.scheduler import Scheduler

# Between two checks that the client is still connected.
_POLL_SECONDS = 1.0
_DONE = "data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


async def call(scheduler: Scheduler, function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a function that runs in the thread of the scheduler."""
    if not scheduler.is_alive:
        raise ApiError(503, "The server is stopping.")
    return await asyncio.wrap_future(scheduler.call(function, *arguments))


class RunningJobs:
    """Some jobs, accepted by the scheduler together or not at all."""

    def __init__(self, scheduler: Scheduler, jobs: Sequence[Job], is_streamed: bool = False):
        self.jobs, self._scheduler, self._is_streamed = jobs, scheduler, is_streamed
        self._loop, self._event, self._is_awaited = asyncio.get_running_loop(), asyncio.Event(), False
        self._seen = (0, 0)
        for job in jobs:
            job.wake = self._wake

    async def submit(self) -> None:
        """Begin; raises the error of the first job that is refused."""
        if not self._scheduler.is_alive:
            raise ApiError(503, "The server is stopping.")
        try:
            futures = [asyncio.wrap_future(self._scheduler.submit(job)) for job in self.jobs]
            await asyncio.gather(*futures)
        except BaseException:
            self.cancel()
            raise

    async def run(self, request: Request) -> None:
        """Begin, and wait until all jobs are done; they end if the client leaves. Raises the error of a failed job."""
        await self.submit()
        async with aclosing(self.updates()) as updates:
            async for _ in updates:
                if not self.are_done and await request.is_disconnected():
                    raise ApiError(499, "The client has gone.")
        self.check()

    async def updates(self) -> AsyncIterator[bool]:
        """Yield when there are new results, and at the end, where it yields True."""
        try:
            while not self.are_done:
                await self._next_results()
                yield False
            yield True
        finally:
            self.cancel()

    @property
    def are_done(self) -> bool:
        return all(job.is_done for job in self.jobs)

    def check(self) -> None:
        """Raise the error of the first job that failed."""
        for job in self.jobs:
            if job.error is not None:
                raise job.error

    def cancel(self) -> None:
        """End the jobs that are not done."""
        for job in self.jobs:
            job.cancel()

    def _progress(self) -> tuple[int, int]:
        return sum(job.released for job in self.jobs), sum(job.is_done for job in self.jobs)

    async def _next_results(self) -> None:
        self._event.clear()
        self._is_awaited = True
        if self._progress() == self._seen:
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await self._event.wait()
        self._is_awaited = False
        self._seen = self._progress()

    def _wake(self) -> None:
        """Called in the scheduler's thread."""
        if self._is_awaited and (self._is_streamed or self.are_done):
            self._is_awaited = False
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._event.set)


class JobsResponse(StreamingResponse):
    """Server-sent events of JSON, whose jobs end with the stream, also when the client has gone.

    Args:
        interval: seconds from sent results to the next update, at least.
        take: the objects of the new results; its argument is True in the last update.
    """

    def __init__(
        self, running: RunningJobs, interval: Callable[[], float], take: Callable[[bool], Iterable[dict[str, Any]]]
    ):
        self._running, self._interval, self._take = running, interval, take
        super().__init__(self._events(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for is_last in self._running.updates():
                self._running.check()
                is_sent = False
                for content in self._take(is_last):
                    is_sent = True
                    yield self.event(content)
                if is_sent and not self._running.are_done:
                    await asyncio.sleep(self._interval())
            async for event in self.ending():
                yield event
        except Exception as error:
            for event in self.failure(error):
                yield event

    def event(self, content: dict[str, Any]) -> str:
        return f"data: {_JSON.encode(content)}\n\n"

    async def ending(self) -> AsyncIterator[str]:
        """The events after the results."""
        yield _DONE

    def failure(self, error: Exception) -> Iterable[str]:
        """The events of an error, the last ones."""
        return self.event(error_body(error)[1]), _DONE

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.cancel()
