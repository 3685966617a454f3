"""Compressing and decompressing without a file's name: bytes in memory, standard input and standard output."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from hf_recurrent.compression.agreement import check_header, model_of, new_coding
from hf_recurrent.compression.archive import Header, read_header, write_header
from hf_recurrent.compression.coding import Progress, decode, encode, no_progress

if TYPE_CHECKING:  # counts alone need no torch
    from transformers import PreTrainedModel


@contextmanager
def spooled(pipe: IO[bytes]) -> Iterator[Path]:
    """A temporary file with everything that a pipe holds: an archive begins with its size."""
    with tempfile.TemporaryDirectory(prefix="hf-recurrent-") as directory:
        path = Path(directory, "input")
        with path.open("wb") as file:
            shutil.copyfileobj(pipe, file)
        yield path


def compress_to(
    output: IO[bytes],
    data: np.ndarray,
    model: "PreTrainedModel | None",
    header: Header,
    progress: Progress = no_progress,
) -> None:
    """Append the archive of data, uint8, to a file that may be a pipe. Arguments as for [`compress_file`]."""
    with new_coding(header, model) as coding:
        write_header(output, header)
        for _, done in encode(data, output, coding, progress=progress):
            progress(done)


def decompress_to(
    output: IO[bytes],
    archive: IO[bytes],
    length: int,
    model: "PreTrainedModel | None" = None,
    progress: Progress = no_progress,
) -> None:
    """Write the data of an archive of `length` bytes to a file that can seek, from its beginning.

    Raises:
        ArchiveError: as [`decompress`].
    """
    header = read_header(archive, length)
    model = model_of(header, model)
    check_header(header, model)
    with new_coding(header, model) as coding:
        for _, done in decode(archive, header, output, coding, progress=progress):
            progress(done)


def decompress_to_pipe(
    output: IO[bytes],
    archive: IO[bytes],
    length: int,
    model: "PreTrainedModel | None" = None,
    progress: Progress = no_progress,
) -> None:
    """As [`decompress_to`], for a pipe: nothing of an archive that is damaged anywhere is written."""
    with tempfile.TemporaryFile() as whole:
        decompress_to(whole, archive, length, model, progress)
        whole.seek(0)
        shutil.copyfileobj(whole, output)
