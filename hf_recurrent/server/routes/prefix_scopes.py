"""Clients: their keys, their shares, and which of them may start from each other's texts."""

import json

from fastapi import Request

from hf_recurrent.server.routes.settings import ServerSettings


def owner(request: Request) -> str:
    """The name of a client's API key, for its share of the server."""
    return request.scope.get("key_name", "")


def api_key(request: Request) -> bytes:
    """The API key of a client, empty without one."""
    return request.headers.get("authorization", "").partition(" ")[2].strip().encode()


def prefix_salt(settings: ServerSettings, request: Request, cache_salt: str | None) -> bytes | None:
    """The salt of the hashes of a client's texts: clients share states if it is the same. None to share none."""
    key = api_key(request).decode()
    # Strangers without a key cannot be told apart.
    if settings.is_public and not (settings.shares_prefixes or key or cache_salt):
        return None
    return json.dumps(["" if settings.shares_prefixes else key, cache_salt or ""]).encode()
