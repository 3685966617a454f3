"""Projections of memories and hidden states to two or three dimensions, to draw them."""

import numpy as np


def project(points: np.ndarray, dimensions: int, method: str = "pca", seed: int = 0) -> np.ndarray:
    """Project points (T, features) to (T, dimensions), float64.

    Args:
        method: "pca", the directions of largest variance, or "tsne", which needs scikit-learn.
        seed: of t-SNE.

    Raises:
        ValueError: another method, or fewer points or features than dimensions.
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
        # Make signs reproducible: the largest entry of each direction is positive.
        largest = np.abs(directions).argmax(1)[:, None]
        return centred @ (directions * np.sign(np.take_along_axis(directions, largest, 1))).T
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError("t-SNE needs the scikit-learn package: pip install scikit-learn") from error
    perplexity = min(30, (len(points) - 1) / 3)
    return TSNE(dimensions, perplexity=perplexity, init="pca", random_state=seed).fit_transform(points)


def as_colours(points: np.ndarray) -> np.ndarray:
    """Scale points (T, 3) to red, green and blue from 0 to 1."""
    points = points - points.min(0)
    return points / np.maximum(points.max(0), 1e-12)
