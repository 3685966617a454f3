"""Clients: their keys, their shares, and which of them may start from each other's texts."""

import json
from collections.abc import Sequence

import numpy as np
from fastapi import Request

from hf_recurrent.server.routes.served_model import ServedModel
from hf_recurrent.server.text_hashes import TextHashes


def owner(request: Request) -> str:
    """The name of a client's API key, for its share of the server."""
    return request.scope.get("key_name", "")


def api_key(request: Request) -> bytes:
    """The API key of a client, empty without one."""
    return request.headers.get("authorization", "").partition(" ")[2].strip().encode()


def text_hashes(
    served: ServedModel, request: Request, cache_salt: str | None, tokens: np.ndarray, ends: Sequence[int]
) -> TextHashes | None:
    """Hashes of a client's text, under which its states are found and stored; None to do neither."""
    settings, key = served.settings, api_key(request).decode()
    # Strangers without a key cannot be told apart.
    is_stranger = settings.is_public and not (settings.shares_prefixes or key or cache_salt)
    if is_stranger or served.scheduler.reuse is None:
        return None
    salt = json.dumps(["" if settings.shares_prefixes else key, cache_salt or ""]).encode()
    return TextHashes(tokens, salt, ends)
