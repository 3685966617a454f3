"""Compressing and decompressing bytes in memory, and files, which can be interrupted and continued."""

import io
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from hf_recurrent.compression.adaptive_predictor import AdaptiveSettings
from hf_recurrent.compression.agreement import check_header, new_header, new_predictor
from hf_recurrent.compression.archive import Header, read_header, write_header
from hf_recurrent.compression.coding import Progress, decode, encode, no_progress
from hf_recurrent.compression.entropy_coder import require_coder
from hf_recurrent.compression.unfinished import partial_directory, unfinished_file

# Each part begins without context, which costs some hundred bytes.
_SMALLEST_PART = 1 << 16
_MOST_STREAMS = 16


def compress(
    data: bytes | bytearray | memoryview,
    model: PreTrainedModel,
    *,
    adaptive: AdaptiveSettings | None = None,
    streams: int = 1,
    mixes: bool = True,
) -> bytes:
    """Compress bytes with the probabilities of a model.

    Args:
        data: the bytes.
        model: a recurrent byte-level model on the CPU. A model that learns is changed.
        adaptive: how it learns from the data; None for fixed weights.
        streams: B, parts of the data that are coded side by side: faster, but each begins without context.
        mixes: mix the model's probabilities with counts of the bytes that followed the same contexts in the data.

    Raises:
        ValueError: the model does not read bytes, or an argument is not allowed.
        ImportError: `constriction` is not installed.
    """
    require_coder()
    header, archive = new_header(model, len(data), adaptive, streams, mixes), io.BytesIO()
    write_header(archive, header)
    for _ in encode(np.frombuffer(data, np.uint8), archive, new_predictor(header, model)):
        pass
    return archive.getvalue()


def decompress(archive: bytes | bytearray | memoryview, model: PreTrainedModel) -> bytes:
    """The bytes that [`compress`] was given.

    Args:
        archive: its result.
        model: the same model, with the weights from before.

    Raises:
        ArchiveError: it is not an archive or damaged, was made with another model, or needs the arithmetic of another
            machine.
        ImportError: `constriction` is not installed.
    """
    require_coder()
    file, output = io.BytesIO(archive), io.BytesIO()
    header = read_header(file, len(archive))
    check_header(header, model)
    for _ in decode(file, header, output, new_predictor(header, model)):
        pass
    return output.getvalue()


def default_streams(size: int, adaptive: AdaptiveSettings | None) -> int:
    """Number of parts of a file: one for each 64 KiB, at most 16; one for a model that learns."""
    return 1 if adaptive else max(1, min(_MOST_STREAMS, size // _SMALLEST_PART))


def check_output(output: Path, *, force: bool, resume: bool) -> None:
    """Check before work begins that the output may be written, and that `constriction` is installed.

    Args:
        output: the file.
        force: it may be replaced.
        resume: unfinished work may be continued.

    Raises:
        FileExistsError: the file exists, or unfinished work.
        IsADirectoryError: it is a directory.
        ImportError: `constriction` is not installed.
    """
    require_coder()
    if output.is_dir():
        raise IsADirectoryError(f"`--output` is {str(output)!r}; it must be a file, not a directory.")
    if output.exists() and not force:
        raise FileExistsError(f"`--output` is {str(output)!r}, which exists; add --force to replace it.")
    unfinished = partial_directory(output)
    if unfinished.exists() and not resume:
        raise FileExistsError(
            f"{str(unfinished)!r} holds unfinished work; add --resume to continue it, or delete it to begin anew."
        )


def compress_file(
    source: Path, output: Path, model: PreTrainedModel, header: Header, progress: Progress = no_progress
) -> None:
    """Compress a file.

    Until it is complete, the archive is in the directory OUTPUT.partial, with everything needed to continue.

    Args:
        source: the file.
        output: the archive.
        model: the model of the header.
        header: [`new_header`].
        progress: called with the number of bytes done, several times in a block and after it; it may raise to stop.

    Raises:
        ValueError: OUTPUT.partial belongs to another file, model or setting.
        OSError: a file cannot be read or written.
    """
    predictor = new_predictor(header, model)
    # Mapped, so that bytes are read on access; an empty file cannot be mapped.
    data = np.memmap(source, np.uint8, "r") if source.stat().st_size else np.empty(0, np.uint8)
    with unfinished_file(output, {"source": _identity(source), "header": asdict(header)}) as unfinished:
        archive, saved = unfinished.file, unfinished.load(predictor)
        if saved["step"]:
            archive.truncate(saved["position"])
            archive.seek(saved["position"])
            progress(saved["done"])
        else:
            write_header(archive, header)
        blocks = encode(data, archive, predictor, saved["step"], progress)
        unfinished.save_blocks(blocks, predictor, archive, progress)


def decompress_file(source: Path, output: Path, model: PreTrainedModel, progress: Progress = no_progress) -> None:
    """Decompress an archive; until it is complete, the data are in the directory OUTPUT.partial.

    Args:
        source: the archive.
        output: the file.
        model: the model that it was made with.
        progress: called with the number of bytes done, several times in a block and after it; it may raise to stop.

    Raises:
        ArchiveError: as [`decompress`].
        ValueError: OUTPUT.partial belongs to another archive.
        OSError: a file cannot be read or written.
    """
    with source.open("rb") as archive:
        header = read_header(archive, source.stat().st_size)
        check_header(header, model)
        predictor = new_predictor(header, model)
        with unfinished_file(output, {"source": _identity(source)}) as unfinished:
            saved = unfinished.load(predictor)
            if saved["step"]:
                archive.seek(saved["position"])
                progress(saved["done"])
            blocks = decode(archive, header, unfinished.file, predictor, saved["step"], progress)
            unfinished.save_blocks(blocks, predictor, archive, progress)


def _identity(path: Path) -> list[Any]:
    """Path, size and modification time, to recognize the file when the work is continued."""
    status = path.stat()
    return [os.fspath(path.absolute()), status.st_size, status.st_mtime_ns]
