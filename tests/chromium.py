"""Headless Chromium, driven by playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip

needs_chromium = pytest.mark.skipif(_PROGRAM is None, reason="Chromium is not installed")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as starter:
        browser = starter.chromium.launch(executable_path=_PROGRAM, args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()
