"""Pictures of SMT's experiments that are more than lines: several panels, images, memories as points and colours."""

import base64
from typing import Any

import numpy as np


def split_axes(axes: Any, rows: int, columns: int, size: tuple[float, float]) -> list[Any]:
    """Several axes of matplotlib in place of one, row after row.

    Args:
        size: of the figure, in inches.
    """
    figure = axes.figure
    axes.remove()
    figure.set_size_inches(size)
    return list(figure.subplots(rows, columns, squeeze=False).flat)


def pack(array: np.ndarray) -> dict[str, Any]:
    """An array as a JSON value that takes little space in a file of rows: 8 or 16 bits a number, none negative where
    they are integers."""
    kind = np.float16 if array.dtype.kind == "f" else np.uint8 if array.max() < 256 else np.uint16
    array = np.ascontiguousarray(array, dtype=kind)
    return {
        "shape": list(array.shape),
        "type": array.dtype.name,
        "bytes": base64.b64encode(array.tobytes()).decode("ascii"),
    }


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """What [`pack`] packed."""
    return np.frombuffer(base64.b64decode(packed["bytes"]), dtype=packed["type"]).reshape(packed["shape"])


def image_sheet(images: np.ndarray, columns: int) -> np.ndarray:
    """(n, H, W) → one image of all, row after row, with a line of their largest value between them; n is a multiple
    of `columns`."""
    padded = np.pad(images, ((0, 0), (0, 1), (0, 1)), constant_values=images.max())
    rows = padded.reshape(-1, columns, *padded.shape[1:])
    return rows.transpose(0, 2, 1, 3).reshape(rows.shape[0] * rows.shape[2], -1)
