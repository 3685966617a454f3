"""The file format of compressed data.

    archive = "HFRC" · version (1 byte) · size of the data (6) · version of the count memory, 0 without one (1)
              · release (1 + n) · settings (2 + n, JSON) · network (1 + n) · blocks
    network = nothing if counts predict alone, else hash of the weights (8) · fingerprint (4) · kernel (n - 12)
    block   = size of its data (4) · size of its code (4) · CRC-32 of the code (4) · CRC-32 of the data (4) · code

If the code of a block would be larger than its data, the block holds the data instead, and the highest bit of the size
of the code is set.

Integers are little-endian. The code of a block is made by a range coder of bits (`kernels/count_memory_coder.h`),
eight for each byte, the highest first. The fingerprint is a hash of the network's logits on the machine that made the
archive ([`arithmetic_fingerprint`]), since a decoder has to compute the same ones bit for bit; counts need none. The
CRC of the code detects damage; the CRC of the data detects a decoder that computed something else.
"""

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from hf_recurrent import __version__

MAGIC = b"HFRC"
VERSION = 2
_FIXED = struct.Struct("<4sB6sB")
_NETWORK = struct.Struct("<8s4s")
_BLOCK = struct.Struct("<IIII")
# Blocks end at this much code, or this much data, whichever comes first.
BLOCK_CODE = 1 << 16
BLOCK_DATA = 1 << 22
# The encoder checks the size of the code after some hundred symbols.
_LARGEST_CODE = 2 * BLOCK_CODE
_STORED = 1 << 31


class ArchiveError(ValueError):
    """A file that is not an archive, is damaged, or cannot be decoded with this model or on this machine."""


class NetworkRecord(NamedTuple):
    """The values that tie an archive to a network and its arithmetic."""

    weights: str  # hash, 16 hexadecimal digits
    fingerprint: str  # hash of the arithmetic, 8 hexadecimal digits
    kernel: str  # version of torch and instruction set that made the archive, for messages only


@dataclass(frozen=True)
class Header:
    """The values that a decoder needs."""

    size: int  # bytes of the data
    counts: int  # version of the count memory, 0 without one
    network: NetworkRecord | None = None  # None if counts predict alone
    settings: dict[str, Any] = field(default_factory=dict)  # JSON values that differ from the defaults
    release: str = __version__  # of the package that made the archive, for messages only


def write_header(file: IO[bytes], header: Header) -> None:
    settings = json.dumps(header.settings, separators=(",", ":")).encode() if header.settings else b""
    release, network = header.release.encode()[:255], b""
    if header.network is not None:
        weights, fingerprint, kernel = header.network
        network = _NETWORK.pack(bytes.fromhex(weights), bytes.fromhex(fingerprint))
        network += kernel.encode()[: 255 - len(network)]
    file.write(_FIXED.pack(MAGIC, VERSION, header.size.to_bytes(6, "little"), header.counts))
    file.write(bytes([len(release)]) + release + struct.pack("<H", len(settings)) + settings)
    file.write(bytes([len(network)]) + network)


def read_header(file: IO[bytes], length: int) -> Header:
    """Read the beginning of an archive that has `length` bytes."""
    start = file.read(_FIXED.size)
    if start[: len(MAGIC)] != MAGIC:
        raise ArchiveError("it is not an archive of hf-recurrent compress.")
    if len(start) > len(MAGIC) and (version := start[len(MAGIC)]) < VERSION:
        raise ArchiveError(
            f"its format has version {version}, of a development version before hf-recurrent 0.1.0; this release "
            f"reads version {VERSION}: decompress it with the version that made it."
        )
    if len(start) > len(MAGIC) and version > VERSION:
        raise ArchiveError(
            f"its format has version {version}, of a later release; this release reads version {VERSION}: update it."
        )
    if len(start) < _FIXED.size:
        raise ArchiveError("it ends within its header.")
    _, _, size, counts = _FIXED.unpack(start)
    try:
        release = _read(file, _read(file, 1)[0]).decode()
        (count,) = struct.unpack("<H", _read(file, 2))
        settings = json.loads(_read(file, count)) if count else {}
        network = _read_network(_read(file, _read(file, 1)[0]))
    except ArchiveError:
        raise
    except (ValueError, RecursionError, struct.error) as error:
        raise ArchiveError("its header is damaged.") from error
    if not isinstance(settings, dict) or not (counts or network):
        raise ArchiveError("its header is damaged.")
    size = int.from_bytes(size, "little")
    if size > length // _BLOCK.size * BLOCK_DATA:
        raise ArchiveError(f"it is damaged or cut off: {length:,} bytes are too few for {size:,} bytes of data.")
    return Header(size, counts, network, settings, release)


def _read_network(record: bytes) -> NetworkRecord | None:
    if not record:
        return None
    weights, fingerprint = _NETWORK.unpack_from(record)
    return NetworkRecord(weights.hex(), fingerprint.hex(), record[_NETWORK.size :].decode())


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
    """The next block, after blocks of `done` bytes."""
    try:
        size, length, checksum, data_checksum = _BLOCK.unpack(_read(file, _BLOCK.size))
        stored, length = length >= _STORED, length % _STORED
        if not 1 <= size <= BLOCK_DATA or length > _LARGEST_CODE or (stored and length != size):
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
