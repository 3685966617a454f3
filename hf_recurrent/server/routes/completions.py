"""Completions in progress: their choices as text and log-probabilities, in the forms of OpenAI, and limits."""

import codecs
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from fastapi import Request
from fastapi.responses import Response

from hf_recurrent.server.job import Job, Scores
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.running_jobs import JobsResponse, RunningJobs
from hf_recurrent.server.routes.schemas import CompletionRequest, StreamOptions
from hf_recurrent.server.routes.served_model import ServedModel

_DEFAULT_TOKENS = 16  # of OpenAI
_LEAST = -9999.0  # JSON has no infinity


class ScoredToken(NamedTuple):
    """A token with its log-probability."""

    token: int
    value: float | None  # natural logarithm; None where nothing was predicted
    best: dict[int, float]  # the most likely tokens in its place, the best one first
    offset: int  # characters of the text before it


def completion_logprobs(served: ServedModel, scored: Sequence[ScoredToken], count: int) -> dict[str, Any]:
    """`logprobs` of a choice of `/v1/completions`, with at most `count` alternatives for a token."""
    names = served.token_names
    best = [{names[token]: value for token, value in each.best.items()} or None for each in scored]
    return {
        "tokens": [names[each.token] for each in scored],
        "token_logprobs": [each.value for each in scored],
        "top_logprobs": best if count else None,
        "text_offset": [each.offset for each in scored],
    }


def chat_logprobs(served: ServedModel, scored: Sequence[ScoredToken], count: int) -> list[dict[str, Any]]:
    """`logprobs.content` of a choice of a chat, and `logprobs` of a text of a response."""

    def written(token: int, value: float | None) -> dict[str, Any]:
        # A special token has no bytes; a part of a character has no text but its bytes.
        name, data = served.token_names[token].removeprefix("bytes:"), served.decode([token])
        return {"token": name, "logprob": value, "bytes": [*data] or None}

    return [
        written(each.token, each.value) | {"top_logprobs": [written(*pair) for pair in each.best.items()]}
        for each in scored
    ]


@dataclass
class CompletionChoice:
    """One choice of a completion, taken as a whole or piece by piece, in whole characters.

    Bytes that are not UTF-8 become U+FFFD.
    """

    served: ServedModel
    job: Job
    index: int
    prompt: Sequence[int] = ()  # tokens to repeat before the new ones
    prompt_scores: Scores | None = None
    logprobs: int | None = None  # how many of the most likely tokens are listed; None for no log-probabilities
    # The log-probabilities as JSON; its arguments are the model, the tokens, and `logprobs`.
    form: Callable[[ServedModel, Sequence[ScoredToken], int], Any] = completion_logprobs

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length, self._taken, self._is_first, self._is_over = 0, 0, True, False

    def take(self, most: int | None = None) -> dict[str, Any] | None:
        """The JSON of the new part, with a maximum number of tokens; None if nothing is new, and after the end."""
        is_done, released = self.job.is_done, self.job.released  # in this order: nothing is released after the end
        if most is not None and released - self._taken > most:
            is_done, released = False, self._taken + most
        if self._is_over or not (is_done or released > self._taken or (self._is_first and len(self.prompt))):
            return None
        prompt = self.prompt if self._is_first else ()
        new = self.job.output[self._taken : released]
        text, logprobs = "", None
        if self.logprobs is not None:
            scored: list[ScoredToken] = []
            text += self._add_scored(prompt, self.prompt_scores, 0, scored)
            text += self._add_scored(new, self.job.output_scores, self._taken, scored)
            logprobs = self.form(self.served, scored, self.logprobs)
        else:
            text += self._decode(self.served.decode([*prompt, *new]))
        if is_done:
            text += self._decoder.decode(self.job.tail, final=True)
        self._taken, self._is_first, self._is_over = released, False, is_done
        reason = (self.job.finish_reason or "length") if is_done else None
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._length += len(text)
        return text

    def _add_scored(self, tokens: Sequence[int], scores: Scores | None, begin: int, scored: list[ScoredToken]) -> str:
        """Add tokens that begin at a place of their scores; returns their text."""
        text = ""
        for place, token in enumerate(tokens, begin):
            best = scores.alternatives[place].items() if self.logprobs else ()
            value = _finite(scores.log_probabilities[place])
            scored.append(ScoredToken(token, value, {other: _finite(each) for other, each in best}, self._length))
            text += self._decode(self.served.decode([token]))
        return text


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else max(value, _LEAST)


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
        self._head = {"id": f"{self.id_prefix}-{secrets.token_hex(12)}", "object": self.kind}
        self._head |= {"created": int(time.time()), "model": self.body.model}

    def json(self, choices: Sequence[dict[str, Any]], with_usage: bool = False) -> dict[str, Any]:
        """A response or a part of one."""
        found = dict(self._head)
        if self.body.session is not None:
            first = self.choices[0]
            found |= {"session": self.body.session} | first.served.prefix(first.job)
        found["choices"] = list(choices)
        if with_usage:
            prompt = sum(map(len, self.prompts))
            new = sum(len(choice.job.output) for choice in self.choices)
            found["usage"] = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
            cached = sum(reader.cached_tokens for reader in self.readers)
            found["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
        return found

    def take(self, is_last: bool) -> Iterator[dict[str, Any]]:
        """The new parts, for a stream."""
        options = self.body.stream_options or StreamOptions()
        most = 1 if options.every_token else None
        for choice in self.choices:
            while (choice.job.released or choice.job.is_done) and (piece := choice.take(most)):
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
        text = None if body.session is not None else served.text_hashes(request, body.cache_salt, prompt, ends)
        known = await served.known_state(text)
        read = None
        if repeats > 1 and len(prompt):
            read = served.job(request, prompt, scores=prompt_scores, text=text, known=known)
            await RunningJobs(served.scheduler, [read]).run(request)
        for _ in range(repeats):
            job = served.job(
                request,
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
