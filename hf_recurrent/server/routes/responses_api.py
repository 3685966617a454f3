"""OpenAI's /v1/responses. A stored response is a state, from which the next turn reads its own text only."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_recurrent.server.job import Job
from hf_recurrent.server.response_store import ResponseStore, StoredResponse
from hf_recurrent.server.routes.chat_completions import ChatPrompt, chat_prompt
from hf_recurrent.server.routes.chat_schemas import Tools
from hf_recurrent.server.routes.errors import ApiError, error_body
from hf_recurrent.server.routes.openai_api import check_name
from hf_recurrent.server.routes.response_progress import ResponseProgress
from hf_recurrent.server.routes.response_schemas import InputItem, ResponsesRequest
from hf_recurrent.server.routes.running_jobs import JobsResponse, RunningJobs
from hf_recurrent.server.routes.served_model import ServedModel, api_key
from hf_recurrent.server.routes.structured_outputs import text_constraint


def responses_routes(served: ServedModel) -> APIRouter:
    routes, store = APIRouter(prefix="/v1/responses"), served.scheduler.responses

    @routes.post("", response_model=None)
    async def respond(body: ResponsesRequest, request: Request) -> dict | Response:
        check_name(served, body.model)
        turn = await _begin(served, body, request)
        running = RunningJobs(served.scheduler, [turn.job], bool(body.stream))
        if body.stream:
            await running.submit()
            return _ResponseEvents(running, served.send_interval(body.stream_options), turn)
        await running.run(request)
        for _ in turn.progress.take(is_last=True):
            pass
        await turn.save()
        return turn.progress.json()

    @routes.get("/{response_id}")
    async def get_response(response_id: str, request: Request) -> dict:
        """A stored response."""
        return (await _stored(served, response_id, request)).content

    @routes.get("/{response_id}/input_items")
    async def get_input(response_id: str, request: Request) -> dict:
        """The items of its request, the last one first."""
        items = (await _stored(served, response_id, request)).input_items[::-1]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return {"object": "list", "data": items, "has_more": False} | ends

    @routes.delete("/{response_id}")
    async def delete(response_id: str, request: Request) -> dict:
        """Forget a response. Later ones of the same conversation stay."""
        if not await asyncio.to_thread(store.delete, api_key(request), response_id):
            raise _unknown(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return routes


@dataclass
class _Turn:
    """A response, and its parts to store."""

    store: ResponseStore
    body: ResponsesRequest
    key: bytes
    messages: list[dict[str, Any]]
    prompt: ChatPrompt
    job: Job
    progress: ResponseProgress

    async def save(self) -> None:
        """Store the response, before the client learns of its end."""
        if self.body.store is False:
            return
        content, messages = self.progress.json(), list(self.messages)
        names = ("type", "role", "content", "call_id", "name", "arguments")
        for item in content["output"]:
            if item["type"] == "message" or item["status"] != "incomplete":
                kept = {name: item[name] for name in names if name in item}
                InputItem.model_validate(kept).add_to(messages)
        given = [
            {"id": f"msg_{secrets.token_hex(16)}"} | item.model_dump(exclude_none=True) for item in self.body.input
        ]
        new = self.job.output[: self.job.released]
        tokens = np.concatenate([self.prompt.tokens, np.array(new, dtype=np.int64)])
        text = self.prompt.text + self.progress.text
        response = StoredResponse(content, given, messages, text, tokens, self.job.known)
        await asyncio.to_thread(self.store.put, self.key, response)


class _ResponseEvents(JobsResponse):
    """The events of a response; the last one follows when it is stored."""

    def __init__(self, running: RunningJobs, interval: Any, turn: _Turn):
        self._turn = turn
        super().__init__(running, interval, turn.progress.take)

    def event(self, content: dict[str, Any]) -> str:
        return f"event: {content['type']}\n{super().event(content)}"

    async def ending(self) -> AsyncIterator[str]:
        await self._turn.save()
        yield self.event(self._turn.progress.ending())

    def failure(self, error: Exception) -> Iterable[str]:
        return (self.event(self._turn.progress.failure(error_body(error)[1]["error"])),)


async def _begin(served: ServedModel, body: ResponsesRequest, request: Request) -> _Turn:
    """The turn of a request, not yet submitted."""
    key, before = api_key(request), None
    if body.previous_response_id is not None:
        before = await asyncio.to_thread(served.scheduler.responses.get, key, body.previous_response_id)
        if before is None:
            message = f"`previous_response_id` is {body.previous_response_id!r}; there is no such response."
            raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
    messages = [] if before is None else list(before.messages)
    for item in body.input:
        item.add_to(messages)
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    tools = Tools(body.tools or [], body.tool_choice, body.parallel_tool_calls)
    known = before and ChatPrompt(before.text, before.tokens)
    prompt = chat_prompt(served, instructions + messages, tools.definitions, known, "input")
    most = served.settings.limits.most_tokens(body.logprobs is not None)
    limit = body.max_output_tokens or most
    served.check_limit("max_output_tokens", limit, most)
    wanted = body.text and body.text.format
    text = served.text_hashes(request, body.cache_salt, prompt.tokens, prompt.ends)
    is_continued = known is not None and prompt.text.startswith(known.text)
    job = served.job(
        request,
        prompt.tokens,
        body,
        constraint=await text_constraint(served, wanted, "text.format", tools),
        max_new_tokens=limit,
        output_scores=body.logprobs,
        text=text,
        known=await served.known_state(text, before.known if is_continued else None),
    )
    progress = ResponseProgress(served, body, job, len(prompt.tokens), tools.may_call)
    return _Turn(served.scheduler.responses, body, key, messages, prompt, job, progress)


async def _stored(served: ServedModel, response_id: str, request: Request) -> StoredResponse:
    found = await asyncio.to_thread(served.scheduler.responses.get, api_key(request), response_id)
    if found is None:
        raise _unknown(response_id)
    return found


def _unknown(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id {response_id[:80]!r} not found.", "response_id", "response_not_found")
