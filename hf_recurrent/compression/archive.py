"""The file format of compressed data.

    archive = "HFRC" · version (1 byte) · size of the data (6) · hash of the weights (8) · fingerprint (4)
              · kernel (1 + n) · settings (2 + n, JSON) · blocks
    block   = size of its data (4) · size of its code (4) · CRC-32 of the code (4) · CRC-32 of the data (4) · code

If the code of a block would be larger than its data, the block holds the data instead, and the highest bit of the size
of the code is set.

Integers are little-endian. The fingerprint is a hash of the model's probabilities on the machine that compressed the
data ([`arithmetic_fingerprint`]): a decoder has to compute the same ones bit for bit. The CRC of the code detects
damage; the CRC of the data detects a decoder that computed something else.
"""

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

MAGIC = b"HFRC"
VERSION = 1
_FIXED = struct.Struct("<4sB6s8s4s")
_BLOCK = struct.Struct("<IIII")
# Blocks end at this much code, or this much data, whichever comes first.
BLOCK_CODE = 1 << 16
BLOCK_DATA = 1 << 22
# The encoder checks the size of the code after every B symbols, and its last symbols add a few bytes.
_LARGEST_CODE = 2 * BLOCK_CODE
_STORED = 1 << 31


class ArchiveError(ValueError):
    """A file that is not an archive, is damaged, or cannot be decoded with this model or on this machine."""


@dataclass(frozen=True)
class Header:
    """The values that a decoder needs.

    Args:
        size: bytes of the data.
        weights: hash of the weights (16 hexadecimal digits).
        fingerprint: hash of the model's arithmetic (8 hexadecimal digits).
        kernel: version of torch and instruction set that made the archive, for messages only.
        settings: JSON values that differ from the defaults.
    """

    size: int
    weights: str
    fingerprint: str
    kernel: str
    settings: dict[str, Any] = field(default_factory=dict)


def write_header(file: IO[bytes], header: Header) -> None:
    """Write the beginning of an archive."""
    settings = json.dumps(header.settings, separators=(",", ":")).encode() if header.settings else b""
    kernel = header.kernel.encode()[:255]
    size = header.size.to_bytes(6, "little")
    file.write(_FIXED.pack(MAGIC, VERSION, size, bytes.fromhex(header.weights), bytes.fromhex(header.fingerprint)))
    file.write(bytes([len(kernel)]) + kernel + struct.pack("<H", len(settings)) + settings)


def read_header(file: IO[bytes], length: int) -> Header:
    """Read the beginning of an archive that has `length` bytes.

    Raises:
        ArchiveError: the file is not an archive, of a later version, or damaged.
    """
    start = file.read(_FIXED.size)
    if start[: len(MAGIC)] != MAGIC:
        raise ArchiveError("it is not an archive of hf-recurrent compress.")
    if len(start) > len(MAGIC) and start[len(MAGIC)] != VERSION:
        raise ArchiveError(f"its format has version {start[len(MAGIC)]}; this release reads version {VERSION}.")
    if len(start) < _FIXED.size:
        raise ArchiveError("it ends within its header.")
    _, _, size, weights, fingerprint = _FIXED.unpack(start)
    (count,) = _read(file, 1)
    try:
        kernel = _read(file, count).decode()
        (count,) = struct.unpack("<H", _read(file, 2))
        settings = json.loads(_read(file, count)) if count else {}
    except ArchiveError:
        raise
    except (ValueError, RecursionError) as error:
        raise ArchiveError("its header is damaged.") from error
    if not isinstance(settings, dict):
        raise ArchiveError("its header is damaged.")
    size = int.from_bytes(size, "little")
    if size > length // _BLOCK.size * BLOCK_DATA:
        raise ArchiveError(f"it is damaged or cut off: {length:,} bytes are too few for {size:,} bytes of data.")
    return Header(size, weights.hex(), fingerprint.hex(), kernel, settings)


def write_block(file: IO[bytes], data: bytes, code: bytes) -> None:
    """Append a block of data, encoded or as it is."""
    stored = len(code) >= len(data)
    content = data if stored else code
    size = len(content) | (_STORED if stored else 0)
    file.write(_BLOCK.pack(len(data), size, zlib.crc32(content), zlib.crc32(data)) + content)


class Block(NamedTuple):
    """A block: size and CRC-32 of its data, and the code, or the data themselves if `stored`."""

    size: int
    checksum: int
    content: bytes
    stored: bool


def read_block(file: IO[bytes], done: int) -> Block:
    """The next block, after blocks of `done` bytes.

    Raises:
        ArchiveError: the block is cut off or damaged.
    """
    try:
        size, length, checksum, data_checksum = _BLOCK.unpack(_read(file, _BLOCK.size))
        stored, length = length >= _STORED, length % _STORED
        if not 1 <= size <= BLOCK_DATA or length > _LARGEST_CODE or (length != size if stored else length % 4):
            raise ArchiveError("its block is damaged.")
        content = _read(file, length)
    except ArchiveError as error:
        raise ArchiveError(f"it is damaged or cut off in the block after {done:,} bytes of data.") from error
    if zlib.crc32(content) != checksum:
        raise ArchiveError(f"it is damaged in the block after {done:,} bytes of data.")
    return Block(size, data_checksum, content, stored)


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ArchiveError("it ends within its header.")
    return data
