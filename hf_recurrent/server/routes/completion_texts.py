"""Tokens as text and log-probabilities in the forms of OpenAI's completions and of its chats."""

import codecs
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hf_recurrent.server.job import Job, Scores
from hf_recurrent.server.routes.served_model import ServedModel

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


class CompletionChoice:
    """One choice of a completion, taken as a whole or piece by piece, in whole characters.

    Bytes that are not UTF-8 become U+FFFD.

    Args:
        prompt: tokens to repeat before the new ones.
        logprobs: how many of the most likely tokens are listed; None for no log-probabilities.
        form: of the log-probabilities; its arguments are the model, the tokens, and `logprobs`.
    """

    def __init__(
        self,
        served: ServedModel,
        job: Job,
        index: int,
        prompt: Sequence[int] = (),
        prompt_scores: Scores | None = None,
        logprobs: int | None = None,
        form: Callable[[ServedModel, Sequence[ScoredToken], int], Any] = completion_logprobs,
    ):
        self.job, self.served, self._index = job, served, index
        self._prompt, self._prompt_scores, self._logprobs, self._form = prompt, prompt_scores, logprobs, form
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length, self._taken, self._is_first, self._is_over = 0, 0, True, False

    def take(self, most: int | None = None) -> dict[str, Any] | None:
        """The JSON of the new part, with a maximum number of tokens; None if nothing is new, and after the end."""
        is_done, released = self.job.is_done, self.job.released  # in this order: nothing is released after the end
        if most is not None and released - self._taken > most:
            is_done, released = False, self._taken + most
        if self._is_over or not (is_done or released > self._taken or (self._is_first and len(self._prompt))):
            return None
        prompt = self._prompt if self._is_first else ()
        new = self.job.output[self._taken : released]
        text, logprobs = "", None
        if self._logprobs is not None:
            scored: list[ScoredToken] = []
            text += self._add_scored(prompt, self._prompt_scores, 0, scored)
            text += self._add_scored(new, self.job.output_scores, self._taken, scored)
            logprobs = self._form(self.served, scored, self._logprobs)
        else:
            text += self._decode(self.served.decode([*prompt, *new]))
        if is_done:
            text += self._decoder.decode(self.job.tail, final=True)
        self._taken, self._is_first, self._is_over = released, False, is_done
        reason = (self.job.finish_reason or "length") if is_done else None
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._length += len(text)
        return text

    def _add_scored(self, tokens: Sequence[int], scores: Scores | None, begin: int, scored: list[ScoredToken]) -> str:
        """Add tokens that begin at a place of their scores; returns their text."""
        text = ""
        for place, token in enumerate(tokens, begin):
            best = scores.alternatives[place].items() if self._logprobs else ()
            value = _finite(scores.log_probabilities[place])
            scored.append(ScoredToken(token, value, {other: _finite(each) for other, each in best}, self._length))
            text += self._decode(self.served.decode([token]))
        return text


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else max(value, _LEAST)
