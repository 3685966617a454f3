"""Standard output of the commands: a pipe whose reader may end, or a file on a disk that may be full."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hf_recurrent.checkpoints.atomic_files import CANNOT_WRITE


@contextmanager
def checked_output(fail: Callable[[str], object]) -> Iterator[None]:
    """Flush standard output after the block, so that its errors end the command, and not Python's own status 120.

    Exit with status 1 and without words if the reader of the output has ended, as `head` does; an `OSError` of the
    block, of a full disk for example, is passed to `fail` as a sentence.
    """
    try:
        try:
            yield
        except SystemExit as end:
            if end.code:  # it has failed already
                with suppress(OSError):
                    _flush()
            else:
                _flush()
            raise
        _flush()
    except BrokenPipeError:
        discard_output()
        raise SystemExit(1) from None
    except OSError as error:
        fail(describe_os_error(error))


def _flush() -> None:
    """Flush standard output; after an error, drop what is waiting for it."""
    if sys.stdout is None:  # closed by the caller, as `>&-` does
        return
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()
        raise


def discard_output() -> None:
    """Drop what is waiting for standard output, after an error: else Python fails again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe_os_error(error: OSError) -> str:
    """The sentence about an error: a full disk without the name of a file, which our writers give, is the output's."""
    if error.filename is not None or error.errno not in CANNOT_WRITE:
        return str(error)
    discard_output()
    return f"Standard output, or a temporary file, cannot be written: {error.strerror}."


def print_any_text() -> None:
    """Let standard output print names of files that are not UTF-8, with escapes, as standard error does."""
    if hasattr(sys.stdout, "reconfigure"):  # not in a notebook
        sys.stdout.reconfigure(errors="backslashreplace")
