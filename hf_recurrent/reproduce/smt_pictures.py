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


def project(points: np.ndarray, dimensions: int, method: str = "pca", seed: int = 0) -> np.ndarray:
    """Points (T, F) in few dimensions, (T, dimensions) float64.

    Args:
        method: "pca", the directions of largest variance, or "tsne", which needs scikit-learn.
        seed: of t-SNE.

    Raises:
        ValueError: another method, or fewer points or numbers than dimensions.
        ImportError: scikit-learn is missing.
    """
    if method not in ("pca", "tsne"):
        raise ValueError(f"method is {method!r}, allowed is pca or tsne")
    if min(points.shape) < dimensions:
        raise ValueError(f"points has the shape {points.shape}, which has no {dimensions} dimensions")
    points = points.astype(np.float64)
    if method == "pca":
        centred = points - points.mean(0)
        directions = np.linalg.svd(centred, full_matrices=False)[2][:dimensions]
        # The sign of a direction means nothing: here its largest entry is positive.
        largest = np.abs(directions).argmax(1)[:, None]
        return centred @ (directions * np.sign(np.take_along_axis(directions, largest, 1))).T
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError("t-SNE needs the scikit-learn package: pip install scikit-learn") from error
    perplexity = min(30, (len(points) - 1) / 3)
    return TSNE(dimensions, perplexity=perplexity, init="pca", random_state=seed).fit_transform(points)


def as_colours(points: np.ndarray) -> np.ndarray:
    """Three numbers a row, (T, 3), as red, green and blue from 0 to 1."""
    points = points - points.min(0)
    return points / np.maximum(points.max(0), 1e-12)
