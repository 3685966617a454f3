"""Settings of the server's tests: a request without a seed takes the next of a fixed order."""

from itertools import count
from types import SimpleNamespace

import pytest

from hf_recurrent.server.routes import schemas


@pytest.fixture(autouse=True)
def seeds_in_order(monkeypatch):
    """Random models may end a text at any byte: what a test sees must not depend on unpredictable seeds."""
    seeds = count()
    monkeypatch.setattr(schemas, "secrets", SimpleNamespace(randbits=lambda bits: next(seeds)))
