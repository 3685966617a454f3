"""Tests with many cases: the default run takes some, `.ci/run` takes all."""

from collections.abc import Collection, Iterable

import pytest


def some_of(cases: Iterable[str], quick: Collection[str]) -> list:
    """Parameters of a test; all that are not in `quick` run with `-m long`."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.long) for case in cases]
