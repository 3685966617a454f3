"""A conversation with a recurrent model: one state that reads typed and generated text, turn by turn.

With the chat template of a tokenizer, a turn is a message of the user and an answer; without one, typed text is read
as it is, and the model continues it.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_recurrent.generation.text_state import TextState, load_text_state, read_texts, save_text_state
from hf_recurrent.stock_models.with_state import with_state

Message = dict[str, str]


@dataclass(frozen=True)
class Conversation:
    """The text of a conversation and its state; a turn makes a new one, so that earlier ones can be continued."""

    text: TextState | None = None  # None before the first turn
    messages: tuple[Message, ...] = ()  # of the chat template
    read: str = ""  # the text of the template that the state has read


class ConversationPartner:
    """Takes turns with a recurrent model of bytes, by the chat template of its tokenizer if `is_chat`."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, is_chat: bool) -> None:
        self.model, self.tokenizer, self.is_chat = with_state(model), tokenizer, is_chat

    def read(self, before: Conversation, typed: str) -> Conversation:
        """Read a line of the user; an empty one continues the text, and is an error in a chat."""
        if not self.is_chat:
            if not typed and (before.text is None or before.text.pending == [None]):
                raise ValueError("There is nothing to continue; type some text first.")
            return replace(before, text=self._read(before.text, typed) if typed else before.text)
        if not typed:
            raise ValueError("The message is empty; type some text.")
        messages = (*before.messages, {"role": "user", "content": typed})
        rendered = self._render(messages)
        if rendered.startswith(before.read):
            return Conversation(self._read(before.text, rendered.removeprefix(before.read)), messages, rendered)
        # The template changes earlier messages, for example drops some: read everything again.
        return Conversation(self._read(None, rendered), messages, rendered)

    def answer(
        self, before: Conversation, stop: threading.Event, streamer: Any = None, **options: Any
    ) -> tuple[str, Conversation]:
        """Generate until the end byte, the limit in `options`, which are of `generate()`, or the event.

        The last turn of `before` was read. Returns the new text without the end byte, and the conversation with it.
        """
        inputs = torch.tensor([before.text.pending], device=self.model.device)
        output = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            state=before.text.state,
            streamer=streamer,
            stopping_criteria=StoppingCriteriaList([_StopOnEvent(stop)]),
            return_dict_in_generate=True,
            **options,
        )
        new = output.sequences[0, 1:].cpu()
        text = TextState(output.pending_state, [int(new[-1])])
        answer = self.tokenizer.decode(new, skip_special_tokens=True, errors="surrogateescape")
        if not self.is_chat:
            if int(new[-1]) == self.tokenizer.eos_token_id:
                text = None  # a new episode begins with a zero state
            return answer, replace(before, text=text)
        messages = (*before.messages, {"role": "assistant", "content": answer})
        read = before.read + self.tokenizer.decode(new, errors="surrogateescape")
        return answer, Conversation(text, messages, read)

    def save(self, conversation: Conversation, path: Path) -> None:
        """Write the state to a file that [`load`] and `hf-recurrent generate --state` read."""
        if conversation.text is None:
            raise ValueError("There is no state to save; type some text first.")
        save_text_state(self.model, conversation.text, path)

    def load(self, path: Path) -> Conversation:
        """A conversation after the text of a state file; its messages are in the state alone."""
        text = load_text_state(self.model, path)
        if len(text.pending) != 1:
            raise ValueError(f"`{path}` has {len(text.pending)} texts; it must have one.")
        end = self.tokenizer.eos_token_id
        if self.is_chat and text.pending not in ([end], [None]) and end is not None:
            text = self._read_ids(text, np.array([end]))  # ends the last message
        return Conversation(text)

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except ImportError:  # says which package to install
            raise
        except Exception as error:  # a template is code from elsewhere, in a sandbox: it may raise anything
            reason = " ".join(str(error).split()).rstrip(".") or "no reason given"
            raise ValueError(
                f"The tokenizer's chat template fails ({type(error).__name__}: {reason}); start with --plain to "
                "continue text without it."
            ) from error

    def _read(self, text: TextState | None, typed: str) -> TextState:
        # A terminal passes bytes that are not UTF-8 as surrogate escapes (PEP 383).
        return self._read_ids(text, self.tokenizer.encode_bytes(typed.encode("utf-8", "surrogateescape")))

    def _read_ids(self, text: TextState | None, ids: Sequence[int] | np.ndarray) -> TextState:
        return read_texts(self.model, [np.asarray(ids)], text)


class _StopOnEvent(StoppingCriteria):
    """Ends generation once an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._event.is_set(), device=input_ids.device, dtype=torch.bool)
