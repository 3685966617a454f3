"""Projections of memories."""

import numpy as np
import pytest

from papers.engine.projections import as_colours, project


def test_projections():
    generator = np.random.default_rng(0)
    points = generator.normal(size=(50, 2)) * [5, 1] @ np.linalg.qr(generator.normal(size=(6, 6)))[0][:2] + 3
    flat = project(points, 2)
    assert flat.var(0)[0] > flat.var(0)[1] and abs(np.cov(flat.T)[0, 1]) < 1e-9
    # A rotation in the plane of the points keeps distances.
    assert np.allclose(np.linalg.norm(flat[1:] - flat[:-1], axis=1), np.linalg.norm(points[1:] - points[:-1], axis=1))
    colours = as_colours(flat)
    assert colours.min() == 0 and colours.max() == 1
    with pytest.raises(ValueError, match="method is 'umap', allowed is pca or tsne"):
        project(points, 2, "umap")
    with pytest.raises(ValueError, match="has no 3 dimensions"):
        project(points[:, :2], 3)


def test_tsne_or_what_it_needs():
    points = np.random.default_rng(0).normal(size=(20, 4))
    try:
        import sklearn  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="t-SNE needs the scikit-learn package: pip install scikit-learn"):
            project(points, 2, "tsne")
    else:
        assert project(points, 2, "tsne").shape == (20, 2)
