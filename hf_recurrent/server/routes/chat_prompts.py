"""Messages as a prompt, by the chat template of the tokenizer."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jinja2 import TemplateError

from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.served_model import ServedModel


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt.

    Args:
        text: of all messages, and the beginning of an answer.
        tokens: of this text.
        ends: numbers of tokens after which another chat may go on differently.
    """

    text: str
    tokens: np.ndarray
    ends: list[int] = field(default_factory=list)


def chat_prompt(
    served: ServedModel,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    known: ChatPrompt | None = None,
    param: str = "messages",
) -> ChatPrompt:
    """The prompt for an answer.

    Args:
        served: the model.
        messages: as templates have them.
        tools: definitions of tools, likewise.
        known: the text of an earlier turn with its answer, whose tokens are kept where the new text begins with it.
        param: the argument that has the messages, for errors.

    Raises:
        ApiError: there is no chat template, or it refuses the messages.
    """
    tokenizer, name = served.tokenizer, served.settings.name
    if not getattr(tokenizer, "chat_template", None):
        message = f"The model {name!r} is not an assistant: it has no chat template. Use /v1/completions."
        raise ApiError(404, message, "model")
    options = {"tools": tools or None, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except (TemplateError, TypeError, ValueError) as error:  # the template decides which messages it can write
        sentence = f"`{param}` is refused by the chat template: {error}"
        raise ApiError(400, sentence, param, "invalid_value") from error
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
