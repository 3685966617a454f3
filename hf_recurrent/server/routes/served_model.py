"""A model as the two APIs use it: its name, tokenizer, scheduler and limits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from hf_recurrent.generation.sampling import Sampling
from hf_recurrent.server.job import Job, Scores
from hf_recurrent.server.routes.errors import ApiError
from hf_recurrent.server.routes.settings import ServerSettings
from hf_recurrent.server.sampling import TokenSource
from hf_recurrent.server.scheduler import Scheduler
from hf_recurrent.server.session import Snapshot

_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.02, 0.2


@dataclass
class ServedModel:
    """A model that is served.

    Args:
        scheduler: runs it.
        tokenizer: a byte tokenizer.
        settings: of the server.
        created: seconds since 1970.
    """

    scheduler: Scheduler
    tokenizer: Any
    settings: ServerSettings
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def token_names(self) -> list[str]:
        """Every token as OpenAI writes it: its character, or bytes:\\xNN for a part of one."""
        return [_token_name(self.decode([token])) for token in range(self.vocab_size)]

    @property
    def vocab_size(self) -> int:
        """Ids that a prompt may have."""
        return self.scheduler.steps.model.config.vocab_size

    def send_interval(self) -> float:
        """Seconds between two pieces of a stream, now that so many texts are generated."""
        fair = self.scheduler.counts.generating / self.settings.pieces_per_second
        return min(max(fair, _SHORTEST_INTERVAL), _LONGEST_INTERVAL)

    def encode(self, text: str | bytes, param: str) -> np.ndarray:
        """The tokens of a text.

        Raises:
            ApiError: it is not valid Unicode, or the alphabet of the model lacks a byte.
        """
        try:
            return self.tokenizer.encode_bytes(text.encode() if isinstance(text, str) else text)
        except UnicodeEncodeError as error:
            raise ApiError(400, f"`{param}` is not valid Unicode: it has a lone surrogate.", param) from error
        except ValueError as error:
            raise ApiError(400, f"`{param}` cannot be read by this model: {error}", param) from error

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The bytes of tokens."""
        return self.tokenizer.decode_bytes(np.array(tokens, dtype=np.int64))

    def job(
        self,
        tokens: np.ndarray,
        *,
        session: str | None = None,
        start: Snapshot | None = None,
        max_new_tokens: int = 0,
        sampling: Sampling | None = None,
        seed: int = 0,
        stops: Sequence[str] = (),
        scores: Scores | None = None,
        output_scores: Scores | None = None,
    ) -> Job:
        """A job within the limits."""
        return Job(
            tokens,
            session_id=session,
            start=start,
            max_new_tokens=max_new_tokens,
            source=None if sampling is None else TokenSource(sampling, seed),
            stops=[self.encode(stop, "stop").tolist() for stop in stops],
            scores=scores,
            output_scores=output_scores,
            seconds=self.settings.seconds,
        )

    def check_limit(self, param: str, value: int, limit: int) -> None:
        """Raise an ApiError that names an argument above its limit."""
        if value > limit:
            raise ApiError(400, f"`{param}` asks for {value}; this server allows at most {limit}.", param)


def _token_name(data: bytes) -> str:
    return data.decode("ascii") if data.isascii() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
