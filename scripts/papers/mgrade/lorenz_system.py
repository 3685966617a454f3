"""Noisy trajectories on the Lorenz attractor, and the error of predicting them (mGRADE, section 4.1)."""

from functools import cached_property

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_recurrent import ExampleDraws

# Of the three dimensions on the attractor, the same for every split.
MEAN, STD = np.array([0.0, 0.0, 23.55]), np.array([7.92, 9.01, 8.62])
_SETTLING_STEPS, _LARGEST_STEP = 1000, 0.01


def integrate(initial: np.ndarray, num_steps: int, dt: float = 0.01, substeps: int = 1) -> np.ndarray:
    """Trajectories of x' = σ(y - x), y' = x(ρ - z) - y, z' = xy - βz (Lorenz, 1963; σ = 10, ρ = 28, β = 8/3), by
    fourth-order Runge-Kutta.

    Args:
        initial: (B, 3), the first points.
        num_steps: T, points of a trajectory, including the first.
        dt: time between points, divided into `substeps` steps of integration.

    Returns:
        (B, T, 3) float64.
    """

    def change(state: np.ndarray) -> np.ndarray:
        x, y, z = state
        return np.stack([10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z])

    state, h = initial.T, dt / substeps
    points = np.empty((num_steps, *state.shape))
    for step in range(num_steps):
        points[step] = state
        for _ in range(substeps):
            first = change(state)
            second = change(state + h / 2 * first)
            third = change(state + h / 2 * second)
            fourth = change(state + h * third)
            state = state + h / 6 * (first + 2 * second + 2 * third + fourth)
    return np.ascontiguousarray(points.transpose(2, 0, 1))


class LorenzTrajectories(Dataset):
    """Trajectories of which the first dimension is observed, with noise, and predicted one step ahead.

    After Ostrow et al., "Delay embedding theory of neural sequence models" (2024): 5 % Gaussian noise, independent
    over time. The papers do not state the step, the length or clean targets; these are our choices. Dimensions are
    standardised, and the noise is relative to their deviation. Trajectory i of a split is a pure function of the
    arguments and i; it settles on the attractor before it is recorded.

    Items are float32: `input_values` (T, 1), the observed dimension with noise; `labels` (T, 1), the same one step
    later without noise; `unobserved` (T, 2), the other dimensions one step later.
    """

    def __init__(
        self, count: int, num_steps: int, split: str, *, seed: int = 0, dt: float = 0.01, noise: float = 0.05
    ) -> None:
        self.num_steps, self.dt, self.noise = num_steps, dt, noise
        self._draws = ExampleDraws(seed, split, np.arange(count))

    @cached_property
    def clean(self) -> np.ndarray:
        """All three dimensions without noise, standardised: (trajectories, T + 1, 3) float64."""
        initial = MEAN + STD * (2 * self._draws.uniform("initial", 3) - 1)
        substeps = int(np.ceil(self.dt / _LARGEST_STEP))
        settled = integrate(initial, _SETTLING_STEPS, _LARGEST_STEP)[:, -1]
        return (integrate(settled, self.num_steps + 1, self.dt, substeps) - MEAN) / STD

    @cached_property
    def noisy(self) -> np.ndarray:
        """The same with noise."""
        noise = self._draws.normal("noise", (self.num_steps + 1) * 3).reshape(self.clean.shape)
        return self.clean + self.noise * noise

    def __len__(self) -> int:
        return self._draws.num_examples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        following = torch.from_numpy(self.clean[index, 1:]).float()
        seen = torch.from_numpy(self.noisy[index, :-1, :1]).float()
        return {"input_values": seen, "labels": following[:, :1], "unobserved": following[:, 1:]}


def scaled_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean absolute error of (…, T, dimensions) over the error of predicting no change (Hyndman and Koehler, 2006)."""
    errors = (prediction - target).abs().flatten(0, -2).mean(0)
    scales = target.diff(dim=-2).abs().flatten(0, -2).mean(0)
    return (errors / scales).mean()
