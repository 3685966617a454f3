"""IDX, the format in which MNIST and data sets like it are published."""

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np

_GZIP_MAGIC = b"\x1f\x8b"


def find_idx(directory: str | os.PathLike, stem: str, num_dimensions: int) -> Path:
    """The file `<stem>-idx<D>-ubyte`, as it is or with .gz; some copies have a dot before `idx`.

    Raises:
        FileNotFoundError: there is none.
    """
    directory = Path(directory).expanduser()
    names = [f"{stem}{mark}idx{num_dimensions}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise FileNotFoundError(f"{directory / names[0]} (or .gz) is not there")


def read_idx(path: str | os.PathLike, num_dimensions: int) -> np.ndarray:
    """An IDX file of unsigned bytes, as it is or compressed with gzip (told by its first bytes).

    Raises:
        FileNotFoundError: it is not there.
        ValueError: another magic number, a size that does not agree with the header, or damaged compression.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    data = path.read_bytes()
    if data[:2] == _GZIP_MAGIC:
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    header = 4 * (1 + num_dimensions)
    magic = bytes([0, 0, 8, num_dimensions])
    if data[:4] != magic:
        raise ValueError(
            f"{path} begins with the magic number 0x{data[:4].hex()}, allowed is 0x{magic.hex()} (IDX, unsigned "
            f"bytes, {num_dimensions} dimensions)"
        )
    if len(data) < header:
        raise ValueError(f"{path} is truncated: its header has {len(data)} of {header} bytes")
    shape = tuple(int.from_bytes(data[place : place + 4], "big") for place in range(4, header, 4))
    size = math.prod(shape)
    expected = header + size
    if len(data) != expected:
        what = "truncated" if len(data) < expected else "too long"
        raise ValueError(f"{path} is {what}: its header tells of {expected} bytes, but there are {len(data)}")
    if not size:
        raise ValueError(f"{path} is empty: its header tells of the shape {shape}")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)
