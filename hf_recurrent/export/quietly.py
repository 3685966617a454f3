"""Silence for exporters, which print warnings, progress and whole graphs that concern their own authors."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Inside the block, Python's own output, warnings and log messages below errors are dropped. Not for threads."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.CRITICAL))
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
