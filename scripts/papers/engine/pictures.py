"""Helpers for figures: several axes, sheets of images, arrays in rows, projections to two or three dimensions."""

import base64
import statistics
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

Place = TypeVar("Place", float, tuple)


def split_axes(axes: Any, rows: int, columns: int, size: tuple[float, float]) -> list[Any]:
    """Replace one matplotlib axes by rows × columns of them, row after row, in a figure of `size` inches."""
    figure = axes.figure
    axes.remove()
    figure.set_size_inches(size)
    return list(figure.subplots(rows, columns, squeeze=False).flat)


def mean_points(points: Iterable[tuple[Place, float]]) -> list[tuple[Place, float]]:
    """Points (place, value), such as results of several seeds, as one for each place with the mean, by place."""
    values: dict[Place, list[float]] = {}
    for place, value in points:
        values.setdefault(place, []).append(value)
    return [(place, statistics.fmean(values[place])) for place in sorted(values)]


def pack(array: np.ndarray) -> dict[str, Any]:
    """Pack an array into a small JSON value: float16 for floats, uint8 or uint16 for integers, which must not be
    negative."""
    kind = np.float16 if array.dtype.kind == "f" else np.uint8 if array.max() < 256 else np.uint16
    array = np.ascontiguousarray(array, dtype=kind)
    return {
        "shape": list(array.shape),
        "type": array.dtype.name,
        "bytes": base64.b64encode(zlib.compress(array.tobytes(), 9)).decode("ascii"),
    }


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """Undo [`pack`]."""
    content = zlib.decompress(base64.b64decode(packed["bytes"]))
    return np.frombuffer(content, dtype=packed["type"]).reshape(packed["shape"])


def draw_grid(
    axes: Any, cells: Mapping[tuple[float, float], tuple[float, str]], fontsize: str = "medium", **options: Any
) -> None:
    """Draw (line, column) → value and text as a grid of colours with texts; `options` are arguments of `imshow`."""
    lines, columns = (sorted({place[axis] for place in cells}) for axis in (0, 1))
    values = np.full((len(lines), len(columns)), np.nan)
    for (line, column), (value, text) in cells.items():
        place = lines.index(line), columns.index(column)
        values[place] = value
        axes.text(*place[::-1], text, ha="center", va="center", fontsize=fontsize)
    axes.imshow(values, alpha=0.6, **options)
    axes.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])
    axes.set_yticks(range(len(lines)), [f"{line:g}" for line in lines])


def image_sheet(images: np.ndarray, columns: int) -> np.ndarray:
    """Join images (count, height, width) into one, `columns` side by side, with lines of the largest value between."""
    padded = np.pad(images, ((0, 0), (0, 1), (0, 1)), constant_values=images.max())
    rows = padded.reshape(-1, columns, *padded.shape[1:])
    return rows.transpose(0, 2, 1, 3).reshape(rows.shape[0] * rows.shape[2], -1)


def principal_components(points: np.ndarray, count: int) -> np.ndarray:
    """Project points (T, features) to (T, count), float64, on the directions of largest variance."""
    centred = points.astype(np.float64) - points.mean(0, dtype=np.float64)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:count]
    # Make signs reproducible: the largest entry of each direction is positive.
    largest = np.abs(directions).argmax(1)[:, None]
    return centred @ (directions * np.sign(np.take_along_axis(directions, largest, 1))).T


def as_colours(points: np.ndarray) -> np.ndarray:
    """Scale points (T, 3) to red, green and blue from 0 to 1."""
    points = points - points.min(0)
    return points / np.maximum(points.max(0), 1e-12)
