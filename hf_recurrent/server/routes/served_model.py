"""A model as the APIs and the page use it: its name, tokenizer, scheduler and limits."""

import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest

from hf_recurrent.generation.constraints import Constraint, Vocabulary
from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.server.job import Job, Request
from hf_recurrent.server.routes.errors import ABOVE_LIMIT, ApiError
from hf_recurrent.server.routes.schemas import PieceOptions, SamplingFields
from hf_recurrent.server.routes.settings import ServerSettings
from hf_recurrent.server.sampling import TokenSource
from hf_recurrent.server.scheduler import Scheduler
from hf_recurrent.server.text_hashes import TextHashes
from hf_recurrent.server.text_tokenizer import TextTokenizer, shown_bytes

_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.02, 0.2
_WORTH_A_SEARCH = 32  # tokens to be read


@dataclass
class ServedModel:
    """A model that is served."""

    scheduler: Scheduler
    tokenizer: Any  # one that has no bytes as tokens becomes a `TextTokenizer`
    settings: ServerSettings
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def __post_init__(self) -> None:
        if not hasattr(self.tokenizer, "encode_bytes"):
            self.tokenizer = TextTokenizer(self.tokenizer, self.vocab_size)

    @property
    def has_bytes(self) -> bool:
        """True if a token is a byte, or a symbol for one."""
        return not isinstance(self.tokenizer, TextTokenizer)

    @property
    def learns(self) -> bool:
        """True if sessions may learn: the model, or an adapter of each."""
        return self.scheduler.learner is not None or self.scheduler.steps.adapter is not None

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        if isinstance(self.tokenizer, TextTokenizer):
            return self.tokenizer.token_bytes
        return [self.tokenizer.decode_bytes(np.array([token])) for token in range(self.vocab_size)]

    @cached_property
    def token_names(self) -> list[str]:
        """Every token as clients see it; see [`shown_bytes`]."""
        if isinstance(self.tokenizer, TextTokenizer):
            return [self.tokenizer.name(token) for token in range(self.vocab_size)]
        return [shown_bytes(data) for data in self._token_bytes]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Every token as its bytes, for constraints."""
        return Vocabulary(self._token_bytes)

    @cached_property
    def compiling(self) -> asyncio.Semaphore:
        """Held while a constraint is compiled."""
        return asyncio.Semaphore(1)

    @property
    def vocab_size(self) -> int:
        """Ids that a prompt may have."""
        return self.scheduler.steps.vocab_size

    def send_interval(self, options: PieceOptions | None) -> Callable[[], float]:
        """Seconds between two pieces of a stream: more if many texts are generated, 0 for a piece of every token."""
        if options is not None and options.every_token:
            return lambda: 0.0
        counts, rate = self.scheduler.counts, self.settings.limits.pieces_per_second
        return lambda: min(max((counts.generating + counts.waiting) / rate, _SHORTEST_INTERVAL), _LONGEST_INTERVAL)

    def encode(self, text: str | bytes, param: str) -> np.ndarray:
        """The tokens of a text. Chat templates and sessions write a begin token themselves; a `prompt` gets one."""
        options = {} if self.has_bytes else {"begins": param == "prompt"}
        try:
            return self.tokenizer.encode_bytes(text.encode() if isinstance(text, str) else text, **options)
        except UnicodeEncodeError as error:
            message = f"`{param}` is not valid Unicode: it has a lone surrogate."
            raise ApiError(400, message, param, "invalid_value") from error
        except ValueError as error:
            raise ApiError(400, f"`{param}` cannot be read by this model: {error}", param, "invalid_value") from error

    def text_hashes(
        self, request: HttpRequest, cache_salt: str | None, tokens: np.ndarray, ends: Sequence[int]
    ) -> TextHashes | None:
        """Hashes of a client's text, under which its states are found and stored; None to do neither."""
        key = api_key(request).decode()
        is_shared = self.settings.shares_prefixes
        # Strangers without a key cannot be told apart.
        is_stranger = self.settings.is_public and not (is_shared or key or cache_salt)
        if is_stranger or self.scheduler.reuse is None:
            return None
        return TextHashes(tokens, json.dumps(["" if is_shared else key, cache_salt or ""]).encode(), ends)

    async def known_state(
        self, text: TextHashes | None, known: tuple[int, RecurrentState] | None = None
    ) -> tuple[int, RecurrentState] | None:
        """The longest beginning of a text that this process does not have, but the other ones have, and its state.

        Without one, or for a text without hashes, it is the beginning that is `known` already.
        """
        reuse = self.scheduler.reuse
        if text is None or reuse is None or reuse.shared is None or not self.scheduler.is_alive:
            return known
        longest = len(text) - 1
        own = await asyncio.wrap_future(self.scheduler.call(reuse.store.longest, text, longest))
        own = max(own, known[0] if known else 0)
        if longest - own < _WORTH_A_SEARCH:
            return known
        return await asyncio.to_thread(reuse.shared.find, text, longest, own) or known

    def decode(self, tokens: Sequence[int]) -> bytes:
        known = self._token_bytes
        return b"".join([known[token] for token in tokens])

    def prefix(self, job: Job) -> dict[str, str]:
        """The bytes that a session read before its first generated one, in base64; empty if its text had begun."""
        return {"prefix": base64.b64encode(self.decode(job.prefix)).decode()} if job.prefix else {}

    def job(
        self,
        request: HttpRequest,
        tokens: np.ndarray,
        sampling: SamplingFields | None = None,
        seed: int | None = None,
        prompt: np.ndarray | None = None,
        constraint: Constraint | None = None,
        **options: Any,
    ) -> Job:
        """A job within the limits.

        Args:
            request: of the client, who shares the server with the owners of other API keys.
            tokens: to read.
            sampling: how new text is chosen; None only reads.
            seed: takes precedence over the seed of `sampling`.
            prompt: of which `repetition_penalty` knows; by default, `tokens`.
            constraint: of the new text.
            options: further fields of [`Request`].
        """
        if sampling is not None:
            changes, stops = sampling.changes, sampling.stop or ()
            self.check_tokens("logit_bias", [token for token, _ in changes.logit_bias])
            seed = sampling.seed_or_random() if seed is None else seed
            source = TokenSource(sampling.sampling, seed, changes, self.vocab_size, constraint)
            source.read(tokens if prompt is None else prompt)
            encoded = [self.encode(stop, "stop") for stop in stops]  # may refuse one
            options["stops"] = [*(map(self.decode, encoded) if self.has_bytes else map(str.encode, stops))]
            options |= {"source": source, "token_bytes": self._token_bytes.__getitem__}
        owner = request.scope.get("key_name", "")
        return Job(Request(tokens, seconds=self.settings.limits.seconds, owner=owner, **options))

    def check_tokens(self, param: str, tokens: Iterable[int]) -> None:
        """Raise an ApiError unless the model has all tokens of an argument."""
        known = self.vocab_size
        if wrong := next((token for token in tokens if not 0 <= token < known), None):
            message = f"`{param}` has the token {str(wrong)[:40]}; it must be from 0 to {known - 1}."
            raise ApiError(400, message, param, "invalid_value")

    def check_limit(self, param: str, value: int, limit: int) -> None:
        """Raise an ApiError that names an argument above its limit."""
        if value > limit:
            raise ApiError(400, f"`{param}` asks for {value}; this server allows at most {limit}.", param, ABOVE_LIMIT)


def api_key(request: HttpRequest) -> bytes:
    """The API key of a client, empty without one."""
    return request.headers.get("authorization", "").partition(" ")[2].strip().encode()
