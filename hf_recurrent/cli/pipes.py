"""`-` in place of a file: standard input and standard output of `compress` and `decompress`."""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hf_recurrent.cli.parsing import check_file, check_parent
from hf_recurrent.cli.standard_output import discard_output

PIPE = Path("-")


def check_paths(arguments: argparse.Namespace, name: str, output: Path) -> bool:
    """Check input and output of a command; True if one of them is a pipe, so that nothing of it can be continued.

    Args:
        arguments: with `file`, `json` and `resume`.
        name: of the argument `file`, for messages.
        output: the output, if `--output` is not given the default one.
    """
    if arguments.file != PIPE:
        check_file(name, arguments.file)
    if output != PIPE:
        check_parent("--output", output)
    elif arguments.json:
        raise ValueError("`--json` cannot be combined with the output -; both would be on standard output.")
    is_piped = PIPE in (arguments.file, output)
    if is_piped and arguments.resume:
        raise ValueError("`--resume` cannot be combined with -; a pipe is read from its beginning.")
    return is_piped


@contextmanager
def input_file(path: Path) -> Iterator[Path]:
    """The file, or a temporary copy of standard input."""
    if path != PIPE:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="hf-recurrent-") as directory:
        copy = Path(directory, "input")  # of the whole pipe: an archive begins with its size
        with copy.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield copy


@contextmanager
def output_file(path: Path) -> Iterator[IO[bytes]]:
    """Standard output, or a file that is complete or absent."""
    from hf_recurrent.checkpoints.atomic_files import atomic_file, naming_file

    if path != PIPE:
        with atomic_file(path) as partial, partial.open("wb") as file:
            yield file
        return
    try:
        with naming_file("standard output"):
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
    except OSError:
        discard_output()
        raise
