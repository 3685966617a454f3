"""Files as chunks of decompressed bytes, in constant memory; damage raises a ValueError that names the file."""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hf_recurrent.argument_checks import import_optional

_CHUNK = 1 << 20
# A block of four bytes can hold 128 KiB of equal bytes, so a piece of this size unpacks to 16 MiB at most.
_ZSTANDARD_PIECE = 1 << 9
# Text compresses 3 to 20 times, repetitive logs up to some hundred times.
_LARGEST_RATIO = 1000
_ALWAYS_ALLOWED = 1 << 30
COMPRESSIONS = (".gz", ".zst")


def content_suffix(path: Path) -> str:
    """The suffix of the format, without the compression's: ".jsonl" for "a.jsonl.gz"."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_chunks(path: Path, compression: str | None = None) -> Iterator[bytes]:
    """The bytes of `path` in chunks of at most a megabyte, decompressed if it ends in .gz or .zst.

    `compression` is ".gz", ".zst", or "" for none, whatever the suffix. A ValueError for data that are damaged or
    truncated, or expand without end (see [`check_expansion`]).
    """
    compression = path.suffix.lower() if compression is None else compression
    with open(path, "rb") as file:
        if compression not in COMPRESSIONS:
            while chunk := file.read(_CHUNK):
                yield chunk
            return
        expanded, size = 0, os.fstat(file.fileno()).st_size
        for chunk in (_gzip_chunks if compression == ".gz" else _zstandard_chunks)(path, file):
            expanded += len(chunk)
            check_expansion(path, expanded, size)
            yield chunk


def check_expansion(path: Path, expanded: int, size: int) -> None:
    """Raise a ValueError if the content of a file is larger than 1 GiB and than 1,000 times its size."""
    limit = max(_ALWAYS_ALLOWED, _LARGEST_RATIO * size)
    if expanded > limit:
        raise ValueError(
            f"{path} is refused: its {size:,} bytes expand to more than {limit:,}, as no text does; if its content is "
            "right, store it uncompressed."
        )


def _gzip_chunks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        with gzip.GzipFile(fileobj=file) as content:
            while chunk := content.read1(_CHUNK):
                yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged, not a whole gzip file: {error}") from error


def check_installed(path: Path) -> None:
    """Raise an ImportError if reading a file needs a package that is missing."""
    if path.suffix.lower() == ".zst":
        import_optional("zstandard", f"reading {path} needs the zstandard package: pip install zstandard")


def _zstandard_chunks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    check_installed(path)
    import zstandard

    frame, pending = None, bytearray()
    while piece := file.read(_ZSTANDARD_PIECE):
        while piece:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                content = frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise ValueError(f"{path} is damaged, not a whole Zstandard file: {error}") from error
            pending += content
            while len(pending) >= _CHUNK:
                yield bytes(pending[:_CHUNK])
                del pending[:_CHUNK]
            piece = b""
            if frame.eof:
                piece, frame = frame.unused_data, None
    if frame is not None:
        raise ValueError(f"{path} is damaged, not a whole Zstandard file: it ends within a frame.")
    if pending:
        yield bytes(pending)
