"""Arrays in rows, sheets of images, and projections of memories."""

import math

import numpy as np

from papers.engine.pictures import as_colours, image_sheet, mean_points, pack, principal_components, unpack


def test_arrays_in_rows():
    for array in (np.arange(6).reshape(2, 3), np.array([[300, 2]]), np.array([0.5, -math.pi])):
        again = unpack(pack(array))
        assert again.shape == array.shape
        assert np.allclose(again, array, rtol=1e-3)
    sheet = image_sheet(np.arange(4 * 4).reshape(4, 2, 2), 2)
    assert sheet.tolist()[:3] == [[0, 1, 15, 4, 5, 15], [2, 3, 15, 6, 7, 15], [15] * 6]


def test_points_at_one_place_become_their_mean():
    points = [(2, 1.0), (1, 4.0), (2, 3.0)]
    assert mean_points(points) == [(1, 4.0), (2, 2.0)]
    assert mean_points([((1, 2), 1.0), ((0, 5), 2.0)]) == [((0, 5), 2.0), ((1, 2), 1.0)]


def test_principal_components():
    generator = np.random.default_rng(0)
    points = generator.normal(size=(50, 2)) * [5, 1] @ np.linalg.qr(generator.normal(size=(6, 6)))[0][:2] + 3
    flat = principal_components(points, 2)
    assert flat.var(0)[0] > flat.var(0)[1] and abs(np.cov(flat.T)[0, 1]) < 1e-9
    # A rotation in the plane of the points keeps distances.
    assert np.allclose(np.linalg.norm(flat[1:] - flat[:-1], axis=1), np.linalg.norm(points[1:] - points[:-1], axis=1))
    colours = as_colours(flat)
    assert colours.min() == 0 and colours.max() == 1
