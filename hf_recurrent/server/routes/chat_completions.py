"""Chats: messages become a prompt, and the new text an answer, or calls of tools."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from jinja2 import TemplateError

from hf_recurrent.server.routes.chat_schemas import ChatRequest
from hf_recurrent.server.routes.completions import Completion
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.schemas import CompletionRequest, SamplingFields
from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.routes.tool_calls import CallPart, CallSplitter


def chat_as_completion(served: ServedModel, body: ChatRequest) -> CompletionRequest:
    """The completion of a chat's prompt."""
    names = (*SamplingFields.model_fields, "n", "stream", "stream_options", "cache_salt")
    shared = {name: getattr(body, name) for name in names}
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs` to be true.", "top_logprobs", "invalid_value")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if limit is None:  # an answer has an end
        limit = served.settings.limits.most_tokens(logprobs is not None) // (body.n or 1)
    return CompletionRequest.model_construct(model=body.model, max_tokens=limit, logprobs=logprobs, **shared)


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt: all messages, and the beginning of an answer."""

    text: str
    tokens: np.ndarray
    ends: list[int] = field(default_factory=list)  # numbers of tokens after which another chat may go on differently


def chat_prompt(
    served: ServedModel,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    known: ChatPrompt | None = None,
    param: str = "messages",
) -> ChatPrompt:
    """The prompt for an answer to messages, as templates have them, which are the argument `param`.

    Where the text begins with the `known` one of an earlier turn and its answer, it keeps the tokens of that text.
    Raises an ApiError if there is no chat template, or it refuses the messages.
    """
    tokenizer, name = served.tokenizer, served.settings.name
    if not getattr(tokenizer, "chat_template", None):
        message = f"The model {name!r} is not an assistant: it has no chat template. Use /v1/completions."
        raise ApiError(404, message, "model")
    options = {"tools": tools or None, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except (TemplateError, TypeError, ValueError) as error:  # the template decides which messages it can write
        message = f"`{param}` is refused by the chat template: {error}"
        raise ApiError(400, message, param, "invalid_value") from error
    if known is not None and text.startswith(known.text):
        rest = served.encode(text[len(known.text) :], param)
        tokens = np.concatenate([known.tokens, rest.astype(known.tokens.dtype)])
    else:
        tokens = served.encode(text, param)
    ends = []
    for count in {1, len(messages) - 2, len(messages) - 1} & {*range(1, len(messages))}:
        with suppress(TemplateError, TypeError, ValueError):
            begin = tokenizer.apply_chat_template(messages[:count], **options)
            if text.startswith(begin):
                ends.append(len(served.encode(begin, param)))
    return ChatPrompt(text, tokens, ends)


@dataclass
class ChatCompletion(Completion):
    """A completion whose texts are answers. `may_call` says whether to look for calls of tools in them."""

    kind: ClassVar[str] = "chat.completion"
    id_prefix: ClassVar[str] = "chatcmpl"
    may_call: bool

    def json(self, choices: Sequence[dict[str, Any]], with_usage: bool = False) -> dict[str, Any]:
        is_stream = bool(self.body.stream)
        found = super().json([self._answer(choice, is_stream) for choice in choices], with_usage)
        return found | ({"object": "chat.completion.chunk"} if is_stream else {})

    def take(self, is_last: bool) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            for index in range(len(self.choices)):
                role = {"role": "assistant", "content": ""}
                yield self.json([{"index": index, "delta": role, "finish_reason": None}])
        options = self.body.stream_options
        for found in super().take(is_last):
            (choice,) = found["choices"] or [None]
            # The beginning of a call is not text.
            is_empty = choice and choice["delta"] == {"content": ""} and not choice["logprobs"]
            if not is_empty or choice["finish_reason"] or (options and options.every_token):
                yield found

    def __post_init__(self) -> None:
        super().__post_init__()
        self._has_begun = False
        self._splitters = [CallSplitter() for _ in self.choices]
        self._have_called = [False] * len(self.choices)

    def _answer(self, choice: dict[str, Any], is_stream: bool) -> dict[str, Any]:
        """A choice of a completion as a choice of a chat."""
        index, reason = choice["index"], choice["finish_reason"]
        head = {"index": index, "logprobs": None, "finish_reason": reason}
        if "delta" in choice:
            return head | {"delta": choice["delta"]}
        if choice["logprobs"] is not None:
            head["logprobs"] = {"content": choice["logprobs"], "refusal": None}
        parts = [CallPart(choice["text"])]
        if self.may_call:
            parts = self._splitters[index].feed(choice["text"], reason is not None)
        content, calls = "".join(part.text for part in parts if part.index is None), _calls(parts, is_stream)
        self._have_called[index] |= bool(calls)
        if reason == "stop" and self._have_called[index]:
            head["finish_reason"] = "tool_calls"
        called = {"tool_calls": calls} if calls else {}
        if is_stream:
            return head | {"delta": ({} if calls and not content else {"content": content}) | called}
        message = {"role": "assistant", "content": None if calls and not content.strip() else content}
        return head | {"message": message | {"refusal": None} | called}


def _calls(parts: Sequence[CallPart], is_stream: bool) -> list[dict[str, Any]]:
    """The new calls and pieces of calls."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.index is None:
            continue
        call = calls.setdefault(part.index, {"function": {"arguments": ""}})
        call["function"]["arguments"] += part.text
        if part.id is not None:
            call |= {"id": part.id, "type": "function"}
            call["function"]["name"] = part.name
    return [({"index": index} if is_stream else {}) | call for index, call in calls.items()]
