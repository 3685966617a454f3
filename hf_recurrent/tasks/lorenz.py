"""Next-step prediction of a chaotic system from one noisy dimension of three."""

from functools import cached_property

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_recurrent.tasks.example_draws import ExampleDraws, check_integer, check_split

# Means and standard deviations of the three dimensions on the attractor, the same for every split.
LORENZ_MEAN = np.array([0.0, 0.0, 23.55])
LORENZ_STD = np.array([7.92, 9.01, 8.62])
_SETTLING_STEPS = 1000
_LARGEST_STEP = 0.01


def integrate_lorenz(
    initial: np.ndarray,
    num_steps: int,
    dt: float = 0.01,
    *,
    sigma: float = 10.0,
    rho: float = 28.0,
    beta: float = 8.0 / 3.0,
    substeps: int = 1,
) -> np.ndarray:
    """Trajectories of x' = σ(y - x), y' = x(ρ - z) - y, z' = xy - βz (Lorenz, 1963), by fourth-order Runge-Kutta.

    Args:
        initial: (B, 3), the first points.
        num_steps: T, points of a trajectory, including the first.
        dt: time between points.
        sigma, rho, beta: σ, ρ, β.
        substeps: integration steps between two points.

    Returns:
        (B, T, 3) float64.
    """

    def change(state: np.ndarray) -> np.ndarray:
        x, y, z = state
        return np.stack([sigma * (y - x), x * (rho - z) - y, x * y - beta * z])

    state = np.asarray(initial, dtype=np.float64).T
    points = np.empty((num_steps, *state.shape))
    h = dt / substeps
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
    """Noisy trajectories on the Lorenz attractor; one dimension is observed and predicted one step ahead.

    Source: mGRADE, section 4.1, after Ostrow et al., "Delay embedding theory of neural sequence models" (2024): 2000
    trajectories, 5 % Gaussian noise independent over time, dimension 1 observed. The papers do not state the step, the
    length or clean targets; these are our choices. Dimensions are standardised with mean and standard deviation of the
    attractor, and the noise is relative to that deviation.

    Trajectory i of a split is a pure function of the arguments and i: it starts at a hashed point and settles on the
    attractor before it is recorded. Items are dictionaries of float32 tensors:

    | key | shape | |
    |---|---|---|
    | `input_values` | (T, 1) | the observed dimension with noise |
    | `labels` | (T, 1) | the observed dimension one step later |
    | `unobserved` | (T, 2) | the other dimensions one step later, in order, for a readout trained afterwards |

    Args:
        num_trajectories: number of trajectories.
        num_steps: T.
        split: "train", "validation" or "test".
        seed: any integer.
        dt: time between steps.
        noise: standard deviation of the noise.
        observed: index of the observed dimension, 0 to 2.
        noisy_targets: add noise to `labels` and `unobserved` too.

    Raises:
        ValueError: an unknown split, or a number out of range.
    """

    name = "lorenz"

    def __init__(
        self,
        num_trajectories: int = 2000,
        num_steps: int = 500,
        split: str = "train",
        *,
        seed: int = 0,
        dt: float = 0.01,
        noise: float = 0.05,
        observed: int = 0,
        noisy_targets: bool = False,
    ) -> None:
        check_integer("num_trajectories", num_trajectories, 1)
        check_integer("num_steps", num_steps, 2)
        check_integer("observed", observed, 0, 2)
        if not dt > 0:
            raise ValueError(f"`dt` is {dt}; it must be more than 0.")
        if not noise >= 0:
            raise ValueError(f"`noise` is {noise}; it must be at least 0.")
        self.num_trajectories, self.num_steps, self.split = num_trajectories, num_steps, check_split(split)
        self.seed, self.dt, self.noise = seed, dt, noise
        self.observed, self.noisy_targets = observed, noisy_targets

    @cached_property
    def clean(self) -> np.ndarray:
        """All three dimensions without noise, standardised: (num_trajectories, T + 1, 3) float64."""
        initial = LORENZ_MEAN + LORENZ_STD * (2 * self._draws.uniform("initial", 3) - 1)
        # As many integration steps between two points as the method needs.
        substeps = int(np.ceil(self.dt / _LARGEST_STEP))
        settled = integrate_lorenz(initial, _SETTLING_STEPS, _LARGEST_STEP)[:, -1]
        points = integrate_lorenz(settled, self.num_steps + 1, self.dt, substeps=substeps)
        return (points - LORENZ_MEAN) / LORENZ_STD

    @cached_property
    def noisy(self) -> np.ndarray:
        """The same with noise."""
        noise = self._draws.normal("noise", (self.num_steps + 1) * 3).reshape(self.clean.shape)
        return self.clean + self.noise * noise

    @property
    def _draws(self) -> ExampleDraws:
        return ExampleDraws(self.seed, self.split, np.arange(self.num_trajectories))

    def __len__(self) -> int:
        return self.num_trajectories

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.num_trajectories:
            raise IndexError(f"trajectory {index} of {self.num_trajectories}")
        following = torch.from_numpy((self.noisy if self.noisy_targets else self.clean)[index, 1:]).float()
        seen = slice(self.observed, self.observed + 1)
        hidden = [dimension for dimension in range(3) if dimension != self.observed]
        return {
            "input_values": torch.from_numpy(self.noisy[index, :-1, seen]).float(),
            "labels": following[:, seen],
            "unobserved": following[:, hidden],
        }


def mean_absolute_scaled_error(
    prediction: torch.Tensor | np.ndarray, target: torch.Tensor | np.ndarray
) -> torch.Tensor:
    """Mean absolute error over that of predicting no change, scaled per dimension (Hyndman and Koehler, 2006).

    1 is the error of repeating the present value. A scalar tensor; gradients reach the prediction.

    Args:
        prediction: (…, T, dimensions) real.
        target: the same shape, consecutive steps along T.

    Raises:
        ValueError: other shapes, fewer than 2 steps, or a target that never changes.
    """
    prediction, target = torch.as_tensor(prediction), torch.as_tensor(target)
    if prediction.shape != target.shape or target.dim() < 2 or target.shape[-2] < 2:
        raise ValueError(
            f"`prediction` has shape {tuple(prediction.shape)} and `target` {tuple(target.shape)}; they must be "
            "equal, (…, T, dimensions) with at least 2 steps."
        )
    num_dimensions = target.shape[-1]
    errors = (prediction - target).abs().reshape(-1, num_dimensions).mean(0)
    scales = target.diff(dim=-2).abs().reshape(-1, num_dimensions).mean(0)
    if not (scales > 0).all():
        raise ValueError("`target` has a dimension that never changes; each must change, to give the scale.")
    return (errors / scales).mean()
