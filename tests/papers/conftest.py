"""Small data sets in MNIST's file format."""

import struct
from collections.abc import Callable

import numpy as np
import pytest

from hf_recurrent.cli.reproduce import load_papers

load_papers()


@pytest.fixture
def write_digits(tmp_path) -> Callable[..., str]:
    """`write_digits(prefix, count, side)` writes a folder of images; image i has the label i % 10 and the first pixel
    i."""

    def write(prefix: str, count: int, side: int = 2) -> str:
        folder = tmp_path / "digits"
        folder.mkdir(exist_ok=True)
        images = np.random.default_rng(0).integers(0, 256, (count, side, side)).astype(np.uint8)
        images[:, 0, 0] = np.arange(count)
        for name, array in (("images-idx3", images), ("labels-idx1", (np.arange(count) % 10).astype(np.uint8))):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{prefix}-{name}-ubyte").write_bytes(header + array.tobytes())
        return str(folder)

    return write
