"""Chats: messages become a prompt by the tokenizer's chat template, and the new text an answer."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
from jinja2 import TemplateError

from hf_recurrent.server.routes.completions import Completion
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.schemas import ChatRequest, CompletionRequest, SamplingFields
from hf_recurrent.server.routes.served_model import ServedModel


def chat_prompt(served: ServedModel, body: ChatRequest) -> tuple[CompletionRequest, np.ndarray, list[int]]:
    """The completion of the prompt that the chat template makes of the messages, its tokens, and ends of messages.

    Raises:
        ApiError: there is no chat template, or it refuses the messages.
    """
    tokenizer, name = served.tokenizer, served.settings.name
    if not getattr(tokenizer, "chat_template", None):
        message = f"The model {name!r} is not an assistant: it has no chat template. Use /v1/completions."
        raise ApiError(404, message, "model")
    messages = [{"role": message.role, "content": message.text} for message in body.messages]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ApiError(
            400, f"`messages` is refused by the chat template: {error}", "messages", "invalid_value"
        ) from error
    names = (*SamplingFields.model_fields, "n", "stream", "stream_options", "cache_salt")
    shared = {name: getattr(body, name) for name in names}
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if limit is None:  # an answer has an end
        limit = served.settings.max_new_tokens // (body.n or 1)
    completion = CompletionRequest.model_construct(model=body.model, max_tokens=limit, **shared)
    tokens = served.encode(rendered, "messages")
    return completion, tokens, _message_ends(served, messages, rendered)


def _message_ends(served: ServedModel, messages: list[dict[str, str]], rendered: str) -> list[int]:
    """Numbers of tokens after which another chat may go on: after the first message, and before the last ones."""
    ends = []
    for count in {1, len(messages) - 2, len(messages) - 1} & {*range(1, len(messages))}:
        with suppress(TemplateError):  # the template may refuse a part of the messages
            begin = served.tokenizer.apply_chat_template(messages[:count], tokenize=False)
            if rendered.startswith(begin):
                ends.append(len(served.encode(begin, "messages")))
    return ends


class ChatCompletion(Completion):
    """A completion whose texts are answers."""

    kind: ClassVar[str] = "chat.completion"
    id_prefix: ClassVar[str] = "chatcmpl"

    def json(self, choices: Sequence[dict[str, Any]], with_usage: bool = False) -> dict[str, Any]:
        is_stream = bool(self.body.stream)
        found = super().json([_answer(choice, is_stream) for choice in choices], with_usage)
        return found | ({"object": "chat.completion.chunk"} if is_stream else {})

    def take(self, is_last: bool) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            for index in range(len(self.choices)):
                role = {"role": "assistant", "content": ""}
                yield self.json([{"index": index, "delta": role, "finish_reason": None}])
        yield from super().take(is_last)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._has_begun = False


def _answer(choice: dict[str, Any], is_stream: bool) -> dict[str, Any]:
    """A choice of a completion as a choice of a chat."""
    head = {"index": choice["index"], "logprobs": None, "finish_reason": choice["finish_reason"]}
    if is_stream:
        return head | {"delta": choice.get("delta") or {"content": choice["text"]}}
    return head | {"message": {"role": "assistant", "content": choice["text"], "refusal": None}}
