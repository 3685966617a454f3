"""Sessions: texts that stay, are read and continued piece by piece, forked, moved as files, and learned from."""

import base64
import codecs
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from hf_recurrent.server.job import Job
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.running_jobs import JobsResponse, RunningJobs, call
from hf_recurrent.server.routes.schemas import (
    ChangeRequest,
    CheckpointRequest,
    GenerateRequest,
    MarkRequest,
    ReadRequest,
    SessionRequest,
)
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.scheduler import Scheduler
from hf_recurrent.server.session import Session, Snapshot
from hf_recurrent.server.session_learner import SessionLearner
from hf_recurrent.server.session_store import SessionError


def session_routes(served: ServedModel) -> APIRouter:
    routes = APIRouter(prefix="/v1/sessions")
    _add_sessions(routes, served)
    _add_changes(routes, served)
    _add_texts(routes, served)
    return routes


def _add_sessions(routes: APIRouter, served: ServedModel) -> None:
    """Create, list and delete sessions, and move them as files."""
    scheduler, store = served.scheduler, served.scheduler.store

    @routes.post("")
    async def create(body: SessionRequest | None = None) -> dict:
        """A new session, empty or a copy of another one."""
        learns = body and body.learns
        if learns:
            _check_learning(served)
        if body is None or body.source is None:
            session = await call(scheduler, store.add, Session(Snapshot(store.zero), learns=bool(learns)))
            return _about(session)
        session = await call(scheduler, store.fork, body.source)
        if learns is not None:
            await call(scheduler, store.set_learns, session.id, learns)
        return _about(session)

    @routes.post("/from_state")
    async def create_from_state(request: HttpRequest) -> dict:
        """A new session from the bytes of a state file."""
        return _about(await call(scheduler, _session_of_state, scheduler, await request.body()))

    @routes.get("")
    async def list_sessions(
        after: Annotated[str | None, Query(max_length=100)] = None, limit: Annotated[int, Query(ge=1, le=1000)] = 100
    ) -> dict:
        """Ids of sessions, the oldest first."""
        if served.settings.is_public or served.settings.api_keys:
            raise ApiError(403, "This server has several clients: it does not list the sessions of others.")
        found = await call(scheduler, store.ids, after, limit + 1)
        return {"object": "list", "data": found[:limit], "has_more": len(found) > limit}

    @routes.get("/{session_id}")
    async def get_session(session_id: str) -> dict:
        """A session."""
        return _about(await call(scheduler, store.get, session_id))

    @routes.get("/{session_id}/state")
    async def download(session_id: str) -> Response:
        """The state as a file, which `generate --state` and `chat --state` read too."""
        data = await call(scheduler, _state_of_session, scheduler, session_id)
        headers = {"content-disposition": 'attachment; filename="state.safetensors"'}
        return Response(data, media_type="application/octet-stream", headers=headers)

    @routes.delete("/{session_id}")
    async def delete(session_id: str) -> dict:
        """Forget a session."""
        await call(scheduler, store.delete, session_id)
        return {"id": session_id, "object": "session.deleted", "deleted": True}


def _add_changes(routes: APIRouter, served: ServedModel) -> None:
    """Fork, mark and rewind sessions, and switch learning."""
    scheduler, store = served.scheduler, served.scheduler.store

    @routes.patch("/{session_id}")
    async def change(session_id: str, body: ChangeRequest) -> dict:
        """Switch learning from this session on or off."""
        if body.learns:
            _check_learning(served)
        return _about(await call(scheduler, store.set_learns, session_id, body.learns))

    @routes.post("/{session_id}/fork")
    async def fork(session_id: str) -> dict:
        """Another session at the same place."""
        return _about(await call(scheduler, store.fork, session_id))

    @routes.post("/{session_id}/marks")
    async def set_mark(session_id: str, body: MarkRequest) -> dict:
        """Mark this place."""
        return _about(await call(scheduler, store.set_mark, session_id, body.mark))

    @routes.delete("/{session_id}/marks/{mark}")
    async def delete_mark(session_id: str, mark: str) -> dict:
        """Forget a mark."""
        return _about(await call(scheduler, store.delete_mark, session_id, mark))

    @routes.post("/{session_id}/rewind")
    async def rewind(session_id: str, body: MarkRequest) -> dict:
        """Go back to a mark."""
        return _about(await call(scheduler, store.rewind, session_id, body.mark))


def _add_texts(routes: APIRouter, served: ServedModel) -> None:
    """Read and generate."""

    @routes.post("/{session_id}/read")
    async def read(session_id: str, body: ReadRequest, request: HttpRequest) -> dict:
        """Read a text; returns the bits of every byte."""
        tokens = served.encode(body.content, "base64" if body.text is None else "text")
        job = served.job(request, tokens, session_id=session_id, scores=0 if body.bits else None)
        await RunningJobs(served.scheduler, [job]).run(request)
        result: dict[str, Any] = {"bytes_read": job.snapshot.bytes_read}
        if job.scores is not None:
            bits = _json_bits(job.scores.bits())
            known = [value for value in bits if value is not None]
            size = len(known) if served.has_bytes else len(served.decode(tokens))
            result |= {"bits": bits, "bits_per_byte": sum(known) / size if known and size else None}
        return result

    @routes.post("/{session_id}/generate", response_model=None)
    async def generate(session_id: str, body: GenerateRequest, request: HttpRequest) -> dict | Response:
        """Continue the session, as one answer or as server-sent events."""
        served.check_limit("max_tokens", body.max_tokens, served.settings.limits.max_new_tokens)
        options = {"session_id": session_id, "max_new_tokens": body.max_tokens}
        nothing = np.zeros(0, dtype=np.int64)
        job = served.job(request, nothing, body, output_scores=0 if body.bits else None, **options)
        running = RunningJobs(served.scheduler, [job], body.stream)
        text = _GeneratedText(served, job, body.stream and body.stream_options.every_token)
        if body.stream:
            await running.submit()
            return JobsResponse(running, served.send_interval(body.stream_options), text.take)
        await running.run(request)
        (whole,) = text.take(is_last=True)
        return whole

    @routes.post("/{session_id}/stop")
    async def stop(session_id: str) -> dict:
        """End what the session does: a generation ends where it is, and of a read, nothing was read."""
        return {"stopped": await call(served.scheduler, served.scheduler.stop, session_id)}


def _state_of_session(scheduler: Scheduler, session_id: str) -> bytes:
    """The content of a state file with the present text of a session."""
    snapshot = scheduler.store.get(session_id).snapshot
    if scheduler.learner is not None:
        scheduler.learner.remember_weights()
    try:
        return scheduler.steps.pack(snapshot)
    except ValueError as error:
        raise SessionError(f"The session cannot be saved: {error}") from error


def _session_of_state(scheduler: Scheduler, data: bytes) -> Session:
    """A new session from the content of a state file."""
    known = () if scheduler.learner is None else scheduler.learner.known_weights
    try:
        snapshot = scheduler.steps.unpack(data, known)
    except ValueError as error:
        raise SessionError(str(error)) from error
    return scheduler.store.add(Session(snapshot))


class _GeneratedText:
    """The new bytes of a job that continues a session, taken piece by piece, or byte by byte."""

    def __init__(self, served: ServedModel, job: Job, every_token: bool):
        self._served, self._job, self._every_token, self._taken = served, job, every_token, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, is_last: bool) -> Iterator[dict[str, Any]]:
        """The text generated since the last call; the last piece says how the job ended."""
        end = self._job.released
        while self._every_token and end - self._taken > 1:
            yield self._piece(self._taken + 1, is_last=False)
        if end > self._taken or is_last:
            yield self._piece(end, is_last)

    def _piece(self, end: int, is_last: bool) -> dict[str, Any]:
        begin, self._taken = self._taken, end
        data = self._served.decode(self._job.output[begin:end]) + (self._job.tail if is_last else b"")
        piece = {"text": self._decoder.decode(data, is_last), "base64": base64.b64encode(data).decode()}
        if self._job.output_scores is not None:
            piece["bits"] = _json_bits(self._job.output_scores.bits()[begin:end])
        if is_last:
            piece |= {"finish_reason": self._job.finish_reason, "bytes_read": self._job.snapshot.bytes_read}
            piece |= self._served.prefix(self._job)
        return piece


def _json_bits(bits: Sequence[float]) -> list[float | None]:
    """NaN as null."""
    return [None if math.isnan(value) else value for value in bits]


def _about(session: Session) -> dict[str, Any]:
    """A session as clients see it."""
    return {
        "id": session.id,
        "object": "session",
        "created": session.created,
        "bytes_read": session.snapshot.bytes_read,
        "learns": session.learns,
        "marks": {name: mark.bytes_read for name, mark in session.marks.items()},
    }


def _check_learning(served: ServedModel) -> None:
    if not served.learns:
        message = "`learns` is true, but this server does not learn; start it with --learn or --adapter_rank."
        raise ApiError(400, message, "learns")


def learning_routes(served: ServedModel) -> APIRouter:
    routes = APIRouter(prefix="/v1/learning")
    scheduler = served.scheduler

    @routes.get("")
    async def describe() -> dict:
        """Bytes, updates and bits per byte so far, and the checkpoints."""
        return await call(scheduler, _about_learner, _learner(served))

    @routes.post("/checkpoints")
    async def save() -> dict:
        """Write a checkpoint now."""
        return {"checkpoint": await call(scheduler, _learner(served).save)}

    @routes.post("/unlearn")
    async def unlearn(body: CheckpointRequest) -> dict:
        """Go back to the weights of a checkpoint."""
        try:
            await call(scheduler, _learner(served).unlearn, body.checkpoint)
        except ValueError as error:
            raise ApiError(400, str(error), "checkpoint") from error
        return await describe()

    return routes


def _learner(served: ServedModel) -> SessionLearner:
    if served.scheduler.learner is None:
        raise ApiError(400, "This server does not learn; start it with --learn.")
    return served.scheduler.learner


def _about_learner(learner: SessionLearner) -> dict:
    return dataclasses.asdict(learner.record()) | {"failures": learner.failures, "checkpoints": learner.checkpoints()}
