"""A completion in progress: its choices, their JSON, and the limits of its request."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from fastapi import Request
from fastapi.responses import Response

from hf_recurrent.server.job import Job
from hf_recurrent.server.routes.completion_texts import CompletionChoice, completion_logprobs
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.prefix_scopes import owner, text_hashes
from hf_recurrent.server.routes.running_jobs import JobsResponse, RunningJobs
from hf_recurrent.server.routes.schemas import CompletionRequest, StreamOptions
from hf_recurrent.server.routes.served_model import ServedModel

_DEFAULT_TOKENS = 16  # of OpenAI


@dataclass
class Completion:
    """A completion in progress; `readers` has the job that reads each prompt."""

    kind: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl"

    body: CompletionRequest
    choices: list[CompletionChoice]
    prompts: list[np.ndarray]
    readers: list[Job]

    def __post_init__(self) -> None:
        self._head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": self.body.model,
        }

    def json(self, choices: Sequence[dict[str, Any]], with_usage: bool = False) -> dict[str, Any]:
        """A response or a part of one."""
        head = self._head
        if self.body.session is not None:
            first = self.choices[0]
            head = head | {"session": self.body.session} | first.served.prefix(first.job)
        if not with_usage:
            return head | {"choices": list(choices)}
        prompt = sum(map(len, self.prompts))
        new = sum(len(choice.job.output) for choice in self.choices)
        usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        usage["prompt_tokens_details"] = {"cached_tokens": sum(reader.cached_tokens for reader in self.readers)}
        return head | {"choices": list(choices), "usage": usage}

    def take(self, is_last: bool) -> Iterator[dict[str, Any]]:
        """The new parts, for a stream."""
        options = self.body.stream_options or StreamOptions()
        for choice in self.choices:
            while (choice.job.released or choice.job.is_done) and (
                piece := choice.take(1 if options.every_token else None)
            ):
                # A part of a character is not text yet.
                if piece["text"] or piece["finish_reason"] or piece["logprobs"] or options.every_token:
                    yield self.json([piece])
        if is_last and options.include_usage:
            yield self.json([], with_usage=True)


def check_completion(served: ServedModel, body: CompletionRequest, prompts: Sequence[np.ndarray]) -> None:
    """Raise an ApiError that names the first argument above its limit."""
    limits, count = served.settings.limits, len(prompts) * (body.n or 1)
    served.check_limit("n", count, limits.max_choices)
    served.check_limit("max_tokens", count * max_tokens(body), limits.max_new_tokens)
    if body.session is not None and not served.settings.has_sessions:
        message = "`session` is not supported by a server of several processes; use /v1/responses."
        raise ApiError(400, message, "session", "unsupported_parameter")
    if body.session is not None and count > 1:
        name = "n" if (body.n or 1) > 1 else "prompt"
        raise ApiError(400, f"`session` continues one text, but `{name}` asks for {count}.", name, "invalid_value")
    if not max_tokens(body) and not body.echo and body.session is None:
        message = "`max_tokens` is 0, so there is nothing to do; set `echo` or `session`."
        raise ApiError(400, message, "max_tokens", "invalid_value")
    if body.logprobs is not None:
        scored = count * max_tokens(body) + (sum(map(len, prompts)) * (body.n or 1) if body.echo else 0)
        served.check_limit("logprobs", scored, limits.max_scored)


def max_tokens(body: CompletionRequest) -> int:
    """The largest number of new tokens of a choice."""
    return _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens


async def begin_choices(
    served: ServedModel,
    body: CompletionRequest,
    prompts: Sequence[np.ndarray],
    request: Request,
    ends: Sequence[int] = (),
    form: Callable = completion_logprobs,
    **options: Any,
) -> tuple[list[CompletionChoice], list[Job]]:
    """The choices with their jobs, not yet submitted, and the job that reads each prompt.

    A prompt with several choices is read here, once; `ends` are the ends of its messages. `form` is an argument of
    [`CompletionChoice`], and `options` are of [`ServedModel.job`].
    """
    seed, repeats = body.seed_or_random(), body.n or 1
    prompt_scores = (body.logprobs or 0) if body.echo and body.logprobs is not None else None
    choices: list[CompletionChoice] = []
    readers: list[Job] = []
    for prompt in prompts:
        text = None if body.session is not None else text_hashes(served, request, body.cache_salt, prompt, ends)
        known = await served.known_state(text)
        read = None
        if repeats > 1 and len(prompt):
            read = served.job(prompt, scores=prompt_scores, text=text, known=known, owner=owner(request))
            await RunningJobs(served.scheduler, [read]).run(request)
        for _ in range(repeats):
            job = served.job(
                prompt if read is None else prompt[:0],
                body,
                seed + len(choices),
                prompt,
                session_id=body.session,
                start=read and read.snapshot,
                max_new_tokens=max_tokens(body),
                scores=prompt_scores if read is None else None,
                output_scores=body.logprobs,
                text=text,
                known=known if read is None else None,
                owner=owner(request),
                **options,
            )
            echoed = prompt.tolist() if body.echo else []
            scores = (read or job).scores
            choices.append(CompletionChoice(served, job, len(choices), echoed, scores, body.logprobs, form))
        readers.append(read or choices[-1].job)
    return choices, readers


async def respond(served: ServedModel, completion: Completion, request: Request) -> dict[str, Any] | Response:
    """Run the jobs of a completion; as one answer or as server-sent events."""
    body = completion.body
    running = RunningJobs(served.scheduler, [choice.job for choice in completion.choices], bool(body.stream))
    if body.stream:
        await running.submit()
        return JobsResponse(running, served.send_interval(body.stream_options), completion.take)
    await running.run(request)
    return completion.json([choice.take() for choice in completion.choices], with_usage=True)
