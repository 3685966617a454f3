"""IDX, the file format of MNIST and similar datasets."""

import math
import os
import tempfile
from pathlib import Path

import numpy as np

from hf_recurrent.argument_checks import expand_home
from hf_recurrent.data.decompression import read_chunks

_GZIP_MAGIC = b"\x1f\x8b"


def find_idx(directory: str | os.PathLike, stem: str, num_dimensions: int) -> Path:
    """The file `STEM-idxN-ubyte` with N = `num_dimensions`, plain or .gz; some copies have a dot before `idx`.

    Raises:
        FileNotFoundError: no such file.
    """
    directory = expand_home(directory)
    names = [f"{stem}{mark}idx{num_dimensions}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise FileNotFoundError(f"file not found: {directory / names[0]} (or .gz)")


def read_idx(path: str | os.PathLike, num_dimensions: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, plain or compressed with gzip (recognized by its first bytes).

    Raises:
        FileNotFoundError: no such file.
        ValueError: another magic number, a size that differs from the header, or damaged compression.
    """
    path = Path(path)
    header, magic = 4 * (1 + num_dimensions), bytes([0, 0, 8, num_dimensions])
    if not path.is_file():
        raise FileNotFoundError(f"file not found: {path}")
    with open(path, "rb") as file:
        compression = ".gz" if file.read(2) == _GZIP_MAGIC else ""
    with tempfile.TemporaryFile() as unpacked:  # in memory only as far as it is read
        unpacked.writelines(read_chunks(path, compression))
        size = unpacked.tell()
        unpacked.seek(0)
        data = unpacked.read(header)
        if data[:4] != magic:
            raise ValueError(
                f"{path} begins with the magic number 0x{data[:4].hex()}; it must be 0x{magic.hex()} (IDX, unsigned "
                f"bytes, {num_dimensions} dimensions)."
            )
        if len(data) < header:
            raise ValueError(f"{path} is truncated: its header has {len(data)} of {header} bytes.")
        shape = tuple(int.from_bytes(data[begin : begin + 4], "big") for begin in range(4, header, 4))
        expected = header + math.prod(shape)
        if size != expected:
            defect = "truncated" if size < expected else "too long"
            raise ValueError(f"{path} is {defect}: it has {size} bytes, but {expected} by its header.")
        if not math.prod(shape):
            raise ValueError(f"{path} is empty: its shape is {shape}.")
        return np.memmap(unpacked, dtype=np.uint8, mode="r", offset=header, shape=shape)
