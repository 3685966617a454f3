"""API keys of several clients, with limits for each. Keys are compared as hashes, in constant time."""

import hashlib
import hmac
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hf_recurrent.server.routes.errors import ApiError

_HASHED = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LIMITS = ("max_requests", "requests_per_minute")


@dataclass(frozen=True)
class ApiKey:
    """A key, which is one client for the server."""

    name: str  # in logs and metrics
    digest: bytes  # SHA-256 of the key
    max_requests: int | None = None  # at the same time
    requests_per_minute: int | None = None  # on average, all of them in a moment too


def plain_key(value: str, name: str = "key") -> ApiKey:
    """A key without limits."""
    return ApiKey(name, hashlib.sha256(value.encode()).digest())


def read_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file: on each line a name, the key or `sha256:` and its hash, and limits such as `max_requests=8`.

    Raises a ValueError if a line is wrong; the message does not show the key.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"`--api_keys` {str(path)!r} has characters that a header cannot have.") from error
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            keys.append(_read_key(words))
        except ValueError as error:
            raise ValueError(f"`--api_keys` {str(path)!r}, line {number}: {error}") from None
    for what, values in (("name", [key.name for key in keys]), ("key", [key.digest for key in keys])):
        if len({*values}) < len(values):
            raise ValueError(f"`--api_keys` {str(path)!r} has the same {what} twice.")
    if not keys:
        raise ValueError(f"`--api_keys` {str(path)!r} has no key.")
    return tuple(keys)


def _read_key(words: Sequence[str]) -> ApiKey:
    if len(words) < 2 or not _NAME.fullmatch(words[0]):
        raise ValueError("it must have a name of letters, digits, '_', '.' and '-', and a key.")
    hashed, limits = _HASHED.fullmatch(words[1]), {}
    if words[1].startswith("sha256:") and not hashed:
        raise ValueError("after 'sha256:', it must have 64 hexadecimal digits in lower case.")
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name not in _LIMITS or not value.isdigit() or not int(value):
            raise ValueError(f"a limit must be one of {', '.join(_LIMITS)}, '=' and a number of at least 1.")
        limits[name] = int(value)
    digest = bytes.fromhex(hashed[1]) if hashed else hashlib.sha256(words[1].encode()).digest()
    return ApiKey(words[0], digest, **limits)


class KeyRing:
    """The keys of a server, and what their clients do at the moment. The event loop uses it."""

    def __init__(self, keys: Sequence[ApiKey]):
        self._keys = tuple(keys)
        self._running: dict[str, int] = {key.name: 0 for key in keys}
        self._budgets = {key.name: (float(key.requests_per_minute or 0), 0.0) for key in keys}

    def find(self, value: bytes) -> ApiKey | None:
        """The key with a value; all keys are compared, and each one as a whole."""
        digest, found = hashlib.sha256(value).digest(), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    @contextmanager
    def request(self, key: ApiKey) -> Iterator[None]:
        """A request of a client; raises an ApiError if a limit of the key is reached."""
        if key.max_requests is not None and self._running[key.name] >= key.max_requests:
            raise _too_many(f"The key {key.name!r} has {key.max_requests} requests running, its limit.", 1)
        if key.requests_per_minute is not None:
            self._spend(key)
        self._running[key.name] += 1
        try:
            yield
        finally:
            self._running[key.name] -= 1

    def _spend(self, key: ApiKey) -> None:
        most, (left, then) = key.requests_per_minute, self._budgets[key.name]
        now = time.monotonic()
        left = min(most, left + (now - then) * most / 60) if then else left
        if left < 1:
            seconds = math.ceil((1 - left) * 60 / most)
            raise _too_many(f"The key {key.name!r} may send {most} requests per minute.", seconds)
        self._budgets[key.name] = left - 1, now


def _too_many(message: str, seconds: int) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(seconds)})
