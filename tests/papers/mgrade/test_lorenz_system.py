"""The Lorenz system against half the step size, its observed dimension, and the error measure."""

import numpy as np
import pytest
import torch

from papers.mgrade.lorenz_system import MEAN, STD, LorenzTrajectories, integrate, scaled_error


def test_integration_agrees_with_half_the_step():
    initial = np.array([[1.0, 1.0, 1.0], [-5.0, 3.0, 20.0], [8.0, 8.0, 27.0]])
    whole = integrate(initial, 101, 0.01)
    half = integrate(initial, 201, 0.005)[:, ::2]
    quarter = integrate(initial, 101, 0.01, substeps=4)
    assert np.array_equal(whole[:, 0], initial)
    # Fourth order: half the step, a sixteenth of the error.
    first, second = np.abs(whole - quarter).max(), np.abs(half - quarter).max()
    assert first < 1e-3 and 10 < first / second < 25


def test_a_step_against_the_equations():
    """A small step is the right-hand side times the step, to second order."""
    point = np.array([[2.0, -1.0, 15.0]])
    h = 1e-6
    change = (integrate(point, 2, h)[0, 1] - point[0]) / h
    assert change == pytest.approx([10 * (-1 - 2), 2 * (28 - 15) + 1, 2 * -1 - 8 / 3 * 15], rel=1e-4)


def test_fixed_points_stay():
    edge = np.sqrt(8 / 3 * 27)
    points = np.array([[0, 0, 0], [edge, edge, 27], [-edge, -edge, 27]])
    assert np.abs(integrate(points, 50, 0.01) - points[:, None]).max() < 1e-8


def test_trajectories_are_standardised_noisy_and_shifted():
    data = LorenzTrajectories(100, 300, "train")
    assert len(data) == 100 and data.clean.shape == (100, 301, 3)
    assert np.abs(data.clean.mean((0, 1))).max() < 0.08 and np.abs(data.clean.std((0, 1)) - 1).max() < 0.05
    noise = data.noisy - data.clean
    assert noise.std() == pytest.approx(0.05, rel=0.02) and abs(noise.mean()) < 1e-3
    assert abs(np.corrcoef(noise[:, 1:].ravel(), noise[:, :-1].ravel())[0, 1]) < 0.01
    item = data[3]
    assert {name: tuple(part.shape) for name, part in item.items()} == {
        "input_values": (300, 1),
        "labels": (300, 1),
        "unobserved": (300, 2),
    }
    assert np.allclose(item["input_values"][:, 0], data.noisy[3, :-1, 0], atol=1e-6)
    assert np.allclose(item["labels"][:, 0], data.clean[3, 1:, 0], atol=1e-6)
    assert np.allclose(item["unobserved"], data.clean[3, 1:, 1:], atol=1e-6)


def test_a_trajectory_depends_on_its_index_only():
    many, few = LorenzTrajectories(40, 50, "train"), LorenzTrajectories(6, 50, "train")
    for index in range(6):
        assert torch.equal(many[index]["input_values"], few[index]["input_values"])
    for other in (LorenzTrajectories(6, 50, "validation"), LorenzTrajectories(6, 50, "train", seed=1)):
        assert (other[0]["input_values"] - few[0]["input_values"]).abs().max() > 0.1
    # A step twice as long passes the same points.
    coarse = LorenzTrajectories(6, 25, "train", dt=0.02, noise=0)
    assert np.allclose(coarse.clean, few.clean[:, ::2], atol=1e-6)
    first = few.clean[:, 0] * STD + MEAN
    assert np.allclose(integrate(first, 51, 0.01), few.clean * STD + MEAN, atol=1e-6)


def test_the_error_measure():
    target = torch.randn(4, 20, 2, dtype=torch.float64) * torch.tensor([1.0, 100.0])
    persistence = torch.cat([target[:, :1], target[:, :-1]], dim=1)
    total = 0.0
    for dimension in range(2):
        errors, changes = [], []
        for row in target[..., dimension].tolist():
            errors += [abs(value - row[max(step - 1, 0)]) for step, value in enumerate(row)]
            changes += [abs(row[step] - row[step - 1]) for step in range(1, len(row))]
        total += (sum(errors) / len(errors)) / (sum(changes) / len(changes))
    assert scaled_error(persistence, target).item() == pytest.approx(total / 2)
    assert scaled_error(persistence[:, 1:], target[:, 1:]) == pytest.approx(1.0, abs=0.1)
    assert scaled_error(target, target) == 0
    assert scaled_error(target * 0.5, target) > 0
    prediction = persistence.clone().requires_grad_()
    scaled_error(prediction, target).backward()
    assert prediction.grad.abs().sum() > 0
