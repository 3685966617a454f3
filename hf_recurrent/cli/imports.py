"""Importing torch and transformers, which is most of the time of a short command."""

import atexit
import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside the block, Python searches for no unused cycles, and later not in what is there at the end of the block.

    Imports make a million objects that stay. To search them again and again takes a fifth of the time of the imports.
    """
    was_enabled, was_imported = gc.isenabled(), "torch" in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if "torch" in sys.modules and not was_imported:  # once: what a program has made meanwhile may be garbage
            gc.freeze()
            atexit.register(gc.unfreeze)  # so that libraries find their objects deleted, and report no leaks
        if was_enabled:
            gc.enable()


def import_libraries(*modules: str) -> None:
    """Import torch, transformers and these modules. Commands call it after their checks, because it takes seconds."""
    with without_collection():
        for name in ("hf_recurrent.modeling", *modules):
            importlib.import_module(name)
