"""OpenAI's /v1/models and /v1/completions, with two more arguments: `top_k` and `session`."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from hf_recurrent.server.job import Job
from hf_recurrent.server.routes.completion_texts import CompletionChoice
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.running_jobs import JobsResponse, RunningJobs
from hf_recurrent.server.routes.schemas import CompletionRequest, StreamOptions
from hf_recurrent.server.routes.served_model import ServedModel

_DEFAULT_TOKENS = 16  # of OpenAI


@dataclass
class _Completion:
    """A completion in progress.

    Args:
        body: the request.
        choices: one for each new text.
        prompts: the tokens of each prompt.
    """

    body: CompletionRequest
    choices: list[CompletionChoice]
    prompts: list[np.ndarray]

    def __post_init__(self) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.body.model,
        }

    def json(self, choices: Sequence[dict[str, Any]], with_usage: bool = False) -> dict[str, Any]:
        """A response or a part of one."""
        prompt = sum(map(len, self.prompts))
        new = sum(len(choice.job.output) for choice in self.choices)
        head = self._head
        if self.body.session is not None:
            head = head | {"session": self.body.session} | self.choices[0].prefix
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return head | {"choices": list(choices)} | ({"usage": usage} if with_usage else {})

    def take(self, is_last: bool) -> Iterator[dict[str, Any]]:
        """The new parts, for a stream."""
        options = self.body.stream_options or StreamOptions()
        for choice in self.choices:
            while (choice.job.released or choice.job.is_done) and (
                piece := choice.take(1 if options.every_token else None)
            ):
                # A piece of a character is no text yet.
                if piece["text"] or piece["finish_reason"] or piece["logprobs"] or options.every_token:
                    yield self.json([piece])
        if is_last and options.include_usage:
            yield self.json([], with_usage=True)


def openai_routes(served: ServedModel) -> APIRouter:
    """The routes of this API."""
    routes = APIRouter(prefix="/v1")
    about = {
        "id": served.settings.name,
        "object": "model",
        "created": served.created,
        "owned_by": "hf-recurrent",
        "state_bytes": sum(part.nbytes for part in served.scheduler.store.zero.values()),
        "learns": served.scheduler.learner is not None,
    }

    @routes.get("/models")
    async def list_models() -> dict:
        return {"object": "list", "data": [about]}

    @routes.get("/models/{name:path}")
    async def get_model(name: str) -> dict:
        _check_name(served, name)
        return about

    @routes.post("/chat/completions")
    async def refuse_chat() -> None:
        raise ApiError(404, "There is no chat: the models continue texts; use /v1/completions.")

    @routes.post("/completions", response_model=None)
    async def complete(body: CompletionRequest, request: Request) -> dict | Response:
        _check_name(served, body.model)
        prompts = _prompts(served, body)
        _check(served, body, prompts)
        completion, jobs = await _begin(served, body, prompts, request)
        running = RunningJobs(served.scheduler, jobs, bool(body.stream))
        if body.stream:
            await running.submit()
            return JobsResponse(running, served.send_interval(body.stream_options), completion.take)
        await running.run(request)
        return completion.json([choice.take() for choice in completion.choices], with_usage=True)

    return routes


def _check_name(served: ServedModel, name: str) -> None:
    if name != served.settings.name:
        message = f"`model` is {name[:80]!r}; this server has {served.settings.name!r}."
        raise ApiError(404, message, "model", "model_not_found")


def _prompts(served: ServedModel, body: CompletionRequest) -> list[np.ndarray]:
    """The tokens of each prompt."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError(400, "`prompt` is an empty list; it must have at least one prompt.", "prompt", "invalid_value")
    return [_tokens(served, prompt) for prompt in given]


def _tokens(served: ServedModel, prompt: str | list[int]) -> np.ndarray:
    if isinstance(prompt, str):
        return served.encode(prompt, "prompt")
    if wrong := next((token for token in prompt if not 0 <= token < served.vocab_size), None):
        known = served.vocab_size
        message = f"`prompt` has the token {str(wrong)[:40]}; it must be from 0 to {known - 1}."
        raise ApiError(400, message, "prompt", "invalid_value")
    return np.array(prompt, dtype=np.int64)


def _check(served: ServedModel, body: CompletionRequest, prompts: Sequence[np.ndarray]) -> None:
    limits, count = served.settings, len(prompts) * (body.n or 1)
    served.check_limit("n", count, limits.max_choices)
    served.check_limit("max_tokens", count * _max_tokens(body), limits.max_new_tokens)
    if body.session is not None and count > 1:
        name = "n" if (body.n or 1) > 1 else "prompt"
        raise ApiError(400, f"`session` continues one text, but `{name}` asks for {count}.", name, "invalid_value")
    if not _max_tokens(body) and not body.echo and body.session is None:
        message = "`max_tokens` is 0, so there is nothing to do; set `echo` or `session`."
        raise ApiError(400, message, "max_tokens", "invalid_value")
    if body.logprobs is not None:
        scored = count * _max_tokens(body) + (sum(map(len, prompts)) * (body.n or 1) if body.echo else 0)
        served.check_limit("logprobs", scored, limits.max_scored)


def _max_tokens(body: CompletionRequest) -> int:
    return _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens


async def _begin(
    served: ServedModel, body: CompletionRequest, prompts: Sequence[np.ndarray], request: Request
) -> tuple[_Completion, list[Job]]:
    """The completion with its jobs, not yet submitted. A prompt with several choices is read here, once."""
    seed, repeats = body.seed_or_random(), body.n or 1
    prompt_scores = (body.logprobs or 0) if body.echo and body.logprobs is not None else None
    choices: list[CompletionChoice] = []
    for prompt in prompts:
        read = None
        if repeats > 1 and len(prompt):
            read = served.job(prompt, scores=prompt_scores)
            await RunningJobs(served.scheduler, [read]).run(request)
        for _ in range(repeats):
            job = served.job(
                prompt if read is None else prompt[:0],
                body,
                seed + len(choices),
                prompt,
                session_id=body.session,
                start=read and read.snapshot,
                max_new_tokens=_max_tokens(body),
                scores=prompt_scores if read is None else None,
                output_scores=body.logprobs,
            )
            echoed = prompt.tolist() if body.echo else []
            scores = (read or job).scores
            choices.append(CompletionChoice(served, job, len(choices), echoed, scores, body.logprobs))
    return _Completion(body, choices, list(prompts)), [choice.job for choice in choices]
