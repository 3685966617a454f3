"""Tokens as text and log-probabilities in the form of OpenAI's completions."""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from hf_recurrent.server.job import Job, Scores
from hf_recurrent.server.routes.served_model import ServedModel

_LEAST = -9999.0  # JSON has no infinity


class CompletionChoice:
    """One choice of a completion, taken as a whole or piece by piece, in whole characters.

    Bytes that are not UTF-8 become U+FFFD.

    Args:
        served: the model.
        job: generates it.
        index: of the choice.
        prompt: tokens to repeat before the new ones.
        prompt_scores: of these tokens.
        logprobs: how many of the most likely tokens are listed; None for no log-probabilities.
    """

    def __init__(
        self,
        served: ServedModel,
        job: Job,
        index: int,
        prompt: Sequence[int] = (),
        prompt_scores: Scores | None = None,
        logprobs: int | None = None,
    ):
        self.job, self._served, self._index = job, served, index
        self._prompt, self._prompt_scores, self._logprobs = prompt, prompt_scores, logprobs
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length, self._taken, self._is_first, self._is_over = 0, 0, True, False

    @property
    def prefix(self) -> dict[str, str]:
        """See [`ServedModel.prefix`]."""
        return self._served.prefix(self.job)

    def take(self, most: int | None = None) -> dict[str, Any] | None:
        """The JSON of the new part, of at most so many tokens; None if there is none, and after the end."""
        is_done, released = self.job.is_done, self.job.released  # in this order: nothing is released after the end
        if most is not None and released - self._taken > most:
            is_done, released = False, self._taken + most
        if self._is_over or not (is_done or released > self._taken or (self._is_first and len(self._prompt))):
            return None
        prompt = self._prompt if self._is_first else ()
        new = self.job.output[self._taken : released]
        text, logprobs = "", None
        if self._logprobs is not None:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            text += self._add_scored(prompt, self._prompt_scores, 0, logprobs)
            text += self._add_scored(new, self.job.output_scores, self._taken, logprobs)
            if not self._logprobs:
                logprobs["top_logprobs"] = None
        else:
            text += self._decode(self._served.decode([*prompt, *new]))
        if is_done:
            text += self._decoder.decode(self.job.tail, final=True)
        self._taken, self._is_first, self._is_over = released, False, is_done
        reason = (self.job.finish_reason or "length") if is_done else None
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._length += len(text)
        return text

    def _add_scored(self, tokens: Sequence[int], scores: Scores | None, begin: int, logprobs: dict[str, list]) -> str:
        """Add tokens that begin at a place of their scores; returns their text."""
        text = ""
        for place, token in enumerate(tokens, begin):
            logprobs["tokens"].append(self._served.token_names[token])
            logprobs["text_offset"].append(self._length)
            logprobs["token_logprobs"].append(_finite(scores.log_probabilities[place]))
            if self._logprobs:
                best = scores.alternatives[place]
                named = {self._served.token_names[other]: _finite(value) for other, value in best.items()}
                logprobs["top_logprobs"].append(named or None)
            text += self._decode(self._served.decode([token]))
        return text


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else max(value, _LEAST)
