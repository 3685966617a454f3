"""Compressing and decompressing bytes in memory, pipes, and files, which can be interrupted and continued.

Until it is complete, an output is in the directory OUTPUT.partial, with everything needed to continue.
"""

import io
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from hf_recurrent.checkpoints.atomic_files import naming_file
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.compression.agreement import check_header, model_of, new_coding, new_header, new_network
from hf_recurrent.compression.archive import ArchiveError, Header, read_header, write_header
from hf_recurrent.compression.byte_coding import ByteCoding, require_kernel
from hf_recurrent.compression.coding import Progress, decode, encode, no_progress

if TYPE_CHECKING:  # counts alone need no torch
    from transformers import PreTrainedModel

    from hf_recurrent.compression.adaptive_predictor import AdaptiveSettings

# Each part begins without context, which costs some hundred bytes.
_SMALLEST_PART = 1 << 16
_MOST_STREAMS = 16
_PROGRESS = "progress"  # files of a checkpoint in OUTPUT.partial
_SECONDS_BETWEEN_SAVES = 30.0


def compress(
    data: bytes | bytearray | memoryview,
    model: "PreTrainedModel | None" = None,
    *,
    adaptive: "AdaptiveSettings | None" = None,
    streams: int = 1,
    mixes: bool = True,
) -> bytes:
    """Compress bytes with predictions of the next one: by counts of contexts, and by a model's network.

    Args:
        data: the bytes.
        model: a recurrent byte-level model on the CPU. One that learns is changed. None for counts alone, whose
            archive every machine can decompress, or, with `adaptive`, for a small network with new weights.
        adaptive: how the network learns from the data; None for fixed weights.
        streams: B, parts of the data that are coded side by side: faster, but each begins without context.
        mixes: mix the network's predictions with counts of the bytes that followed the same contexts, in the model's
            own count memory, if it has one, and in the data.

    Raises:
        ValueError: the model does not read bytes, or an argument is not allowed.
        ImportError: the compiled kernel was not built.
    """
    require_kernel()
    if is_new := model is None and adaptive is not None:
        model = new_network()
    header, archive = new_header(model, len(data), adaptive, streams, mixes, is_new), io.BytesIO()
    compress_to(archive, np.frombuffer(data, np.uint8), model, header)
    return archive.getvalue()


def decompress(archive: bytes | bytearray | memoryview, model: "PreTrainedModel | None" = None) -> bytes:
    """The bytes that [`compress`] was given.

    Args:
        archive: its result.
        model: the same model, with the weights from before; None if none was given.

    Raises:
        ArchiveError: it is not an archive or damaged, was made with another model, or needs the arithmetic of another
            machine.
        ImportError: the compiled kernel was not built.
    """
    require_kernel()
    output = io.BytesIO()
    decompress_to(output, io.BytesIO(archive), len(archive), model)
    return output.getvalue()


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
        for _ in encode(data, output, coding, progress=progress):
            pass


def decompress_to(
    output: IO[bytes],
    archive: IO[bytes],
    length: int,
    model: "PreTrainedModel | None" = None,
    progress: Progress = no_progress,
) -> None:
    """Write the data of an archive of `length` bytes to a file that can seek, from its beginning."""
    header, model = _checked_header(archive, length, model)
    with new_coding(header, model) as coding:
        for _ in decode(archive, header, output, coding, progress=progress):
            pass


def decompress_to_pipe(
    output: IO[bytes], archive: IO[bytes], length: int, model: "PreTrainedModel | None", progress: Progress
) -> None:
    """As [`decompress_to`], for a pipe: nothing of an archive that is damaged anywhere is written."""
    with tempfile.TemporaryFile() as whole:
        decompress_to(whole, archive, length, model, progress)
        whole.seek(0)
        shutil.copyfileobj(whole, output)


def _checked_header(
    archive: IO[bytes], length: int, model: "PreTrainedModel | None"
) -> "tuple[Header, PreTrainedModel | None]":
    """The header at the beginning of an archive, and its model; an ArchiveError if it cannot be decoded here."""
    header = read_header(archive, length)
    model = model_of(header, model)
    check_header(header, model)
    return header, model


def default_streams(size: int, adaptive: "AdaptiveSettings | None") -> int:
    """Number of parts of a file: one for each 64 KiB, at most 16; one for a model that learns."""
    return 1 if adaptive else max(1, min(_MOST_STREAMS, size // _SMALLEST_PART))


def mapped(source: Path) -> np.ndarray:
    """The bytes of a file, which are read on access; an empty file cannot be mapped."""
    return np.memmap(source, np.uint8, "r") if source.stat().st_size else np.empty(0, np.uint8)


def check_output(output: Path, *, force: bool, resume: bool) -> None:
    """Raise an error before work begins if the output may not be written, or the kernel was not built."""
    require_kernel()
    if output.is_dir():
        raise IsADirectoryError(f"`--output` is {str(output)!r}; it must be a file, not a directory.")
    if output.exists() and not output.is_file():
        raise ValueError(f"`--output` is {str(output)!r}, which is not a regular file; give the name of a file, or -.")
    if output.exists() and not force:
        raise FileExistsError(f"`--output` is {str(output)!r}, which exists; add --force to replace it.")
    unfinished = _partial_directory(output)
    if unfinished.exists() and not resume:
        raise FileExistsError(
            f"{str(unfinished)!r} holds unfinished work; add --resume to continue it, or delete it to begin anew."
        )


def compress_file(
    source: Path,
    output: Path,
    model: "PreTrainedModel | None",
    header: Header,
    progress: Progress = no_progress,
) -> None:
    """Compress a file.

    Args:
        source: the file.
        output: the archive.
        model: the model of the header; None for counts alone.
        header: [`new_header`].
        progress: called with the number of bytes done, several times in a block and after it; it may raise to stop.

    Raises:
        ValueError: OUTPUT.partial belongs to another file, model or setting.
        OSError: a file cannot be read or written.
    """
    data = mapped(source)
    identity = {"source": _identity(source), "header": asdict(header)}
    with new_coding(header, model) as coding, _unfinished_file(output) as archive:
        saved = _load_progress(output, identity, coding)
        archive.truncate(saved["position"])
        archive.seek(saved["position"])
        if saved["step"]:
            progress(saved["done"])
        else:
            write_header(archive, header)
        blocks = encode(data, archive, coding, saved["step"], progress)
        _code(blocks, output, archive, archive, identity, coding)


def decompress_file(
    source: Path, output: Path, model: "PreTrainedModel | None" = None, progress: Progress = no_progress
) -> None:
    """Decompress an archive.

    Args:
        source: the archive.
        output: the file.
        model: the model that it was made with; None for counts alone.
        progress: called with the number of bytes done, several times in a block and after it; it may raise to stop.

    Raises:
        ArchiveError: as [`decompress`].
        ValueError: OUTPUT.partial belongs to another archive.
        OSError: a file cannot be read or written.
    """
    with source.open("rb") as archive:
        header, model = _checked_header(archive, source.stat().st_size, model)
        identity = {"source": _identity(source)}
        with new_coding(header, model) as coding, _unfinished_file(output) as file:
            saved = _load_progress(output, identity, coding)
            if saved["step"]:
                archive.seek(saved["position"])
                progress(saved["done"])
            else:
                file.truncate(0)
            blocks = decode(archive, header, file, coding, saved["step"], progress)
            _code(blocks, output, file, archive, identity, coding)


def _identity(path: Path) -> list[Any]:
    """Path, size and modification time, to recognize the file when the work is continued."""
    status = path.stat()
    return [os.fspath(path.absolute()), status.st_size, status.st_mtime_ns]


def _partial_directory(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


@contextmanager
def _unfinished_file(output: Path) -> Iterator[IO[bytes]]:
    """A file in OUTPUT.partial, locked against other processes, and renamed to `output` without an exception.

    After an exception, the directory stays only if the work can be continued.
    """
    directory = _partial_directory(output)
    try:
        with output_lock(directory):
            path = directory / "content"
            try:
                with naming_file(output):
                    path.touch()
                    with path.open("r+b") as file:
                        yield file
                        _sync(file)
                os.replace(path, output)
            except BaseException as error:
                if isinstance(error, ArchiveError) or not _directories(directory):
                    _remove_content(directory)
                raise
            _remove_content(directory)
    finally:
        with suppress(OSError):  # it is not empty, or is another process's
            directory.rmdir()


def _remove_content(directory: Path) -> None:
    (directory / "content").unlink(missing_ok=True)
    for saved in _directories(directory):
        shutil.rmtree(saved)


def _directories(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_dir()]


def _load_progress(output: Path, identity: dict[str, Any], coding: ByteCoding) -> dict[str, int]:
    """Restore the coding; returns the step, the number of bytes done and the position in the archive."""
    directory, begin = _partial_directory(output), {"step": 0, "done": 0, "position": 0}
    if not _directories(directory):
        return begin
    from hf_recurrent.checkpoints.files import list_checkpoints, load_tree, reading_checkpoint, remove_staging

    remove_staging(directory)
    saved = list_checkpoints(directory)
    if not saved:
        return begin
    with reading_checkpoint(saved[-1]):
        values = load_tree(saved[-1], _PROGRESS)
        if values["identity"] != identity:
            raise ValueError(f"{str(directory)!r} belongs to another file, model or setting; delete it to begin anew.")
        coding.load_state_dict(values["coding"])
    return values


def _code(
    blocks: Iterator[tuple[int, int]],
    output: Path,
    file: IO[bytes],
    archive: IO[bytes],
    identity: dict[str, Any],
    coding: ByteCoding,
) -> None:
    """Code all blocks, and twice a minute at most, save what is needed to continue after those that are in `file`."""
    last = time.monotonic()
    for step, done in blocks:
        if time.monotonic() - last < _SECONDS_BETWEEN_SAVES:
            continue
        from hf_recurrent.checkpoints import files as checkpoints

        _sync(file)
        before = checkpoints.list_checkpoints(_partial_directory(output))
        directory = _partial_directory(output) / f"checkpoint-{step}"
        staging = checkpoints.new_staging_directory(directory)
        values = {"identity": identity, "coding": coding.state_dict(), "step": step, "done": done}
        checkpoints.save_tree(values | {"position": archive.tell()}, staging, _PROGRESS)
        checkpoints.publish_directory(staging, directory)
        for path in before:
            shutil.rmtree(path)
        last = time.monotonic()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
