"""Files as chunks of decompressed bytes; damage raises a ValueError that names the file."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1 << 20
# A few bytes of Zstandard can unpack to very many; small pieces bound the memory.
_COMPRESSED_CHUNK = 1 << 14
COMPRESSIONS = (".gz", ".zst")


def content_suffix(path: Path) -> str:
    """The suffix of the format, without that of the compression: ".jsonl" for "a.jsonl.gz"."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def read_chunks(path: Path) -> Iterator[bytes]:
    """The bytes of `path` in chunks of about a megabyte, decompressed if it ends in .gz or .zst.

    Raises:
        ValueError: the compressed data are damaged or truncated.
        ImportError: the zstandard package is missing for a .zst file.
    """
    compression = path.suffix.lower()
    try:
        with open(path, "rb") as file:
            if compression == ".zst":
                yield from _zstandard_chunks(path, file)
            else:
                source = gzip.GzipFile(fileobj=file) if compression == ".gz" else file
                while chunk := source.read(_CHUNK):
                    yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error


def _zstandard_chunks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(f"reading {path} needs the zstandard package: pip install zstandard") from error
    frame = None
    while piece := file.read(_COMPRESSED_CHUNK):
        while piece:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                chunk = frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise ValueError(f"{path} is not a whole Zstandard file: {error}") from error
            if chunk:
                yield chunk
            piece = b""
            if frame.eof:
                piece, frame = frame.unused_data, None
    if frame is not None:
        raise ValueError(f"{path} is not a whole Zstandard file: it ends within a frame.")
