"""Anomalies of one sensor, found while it is learned: a learner in C of 21 kB, without a training set.

The first series is generated: one coordinate of Lorenz's attractor with noise, of which three samples are lost now and
then, so that all values are usual. The second is real if the package river is installed: the flow of water through a
pipeline, hourly, with three losses of water.

python sensor_anomaly.py
"""

import argparse
import csv
import importlib.util
from pathlib import Path

import numpy as np
from compiled_learner import CompiledLearner

from hf_recurrent.plotting import require_pyplot

EXPORT = ("--inputs", "1", "--learning_rate", "3e-3")
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "results" / "on_device_sensor.png"
LENGTH, FAULTS, LOST = 40_000, 100, 3  # samples; faults in the second half, and samples that each of them loses
NOISE = 0.02


def lorenz(length: int, step: float = 0.05) -> np.ndarray:
    """The first coordinate of Lorenz's attractor, (length,), by Runge and Kutta's rule of fourth order."""

    def slope(point):
        x, y, z = point
        return np.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    point, series = np.array([1.0, 1.0, 20.0]), []
    for _ in range(length):
        first = slope(point)
        second = slope(point + step / 2 * first)
        third = slope(point + step / 2 * second)
        point = point + step / 6 * (first + 2 * second + 2 * third + slope(point + step * third))
        series.append(point[0])
    return np.array(series)


def with_losses(series: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A noisy series with lost samples in its second half, and true for the first sample after each loss."""
    generator = np.random.default_rng(seed)
    kept, after = np.ones(len(series), dtype=bool), np.zeros(len(series), dtype=bool)
    places = np.linspace(len(series) // 2, len(series) - 50, FAULTS).astype(int)
    for begin in places + generator.integers(0, 20, FAULTS):
        kept[begin : begin + LOST], after[begin + LOST] = False, True
    return (series + generator.normal(0, NOISE, len(series)))[kept], after[kept]


def water_flow() -> tuple[list[str], np.ndarray] | None:
    """Times and liters per second, from the package river, or None without it."""
    package = importlib.util.find_spec("river")
    path = package and Path(package.submodule_search_locations[0], "datasets", "water-flow.csv")
    if not path or not path.is_file():
        return None
    with path.open() as file:
        rows = list(csv.reader(file))[1:]
    return [time for time, _ in rows], np.array([float(value) for _, value in rows])


def scores(series: np.ndarray) -> tuple[np.ndarray, int]:
    """How unexpected every value was, and the memory of the learner."""
    learner = CompiledLearner(*EXPORT)
    return np.array([learner.learn_values([value]) for value in series]), learner.memory


def area_under_curve(found: np.ndarray, faulty: np.ndarray) -> float:
    """Of the ROC curve: the probability that a faulty sample has a higher score than another one."""
    order = np.argsort(np.argsort(found))
    faults, others = faulty.sum(), (~faulty).sum()
    return float((order[faulty].sum() - faults * (faults - 1) / 2) / (faults * others))


def baselines(series: np.ndarray) -> dict[str, np.ndarray]:
    """Scores without a model of the series."""
    return {
        "distance from the mean": np.abs(series - series.mean()),
        "change": np.abs(np.diff(series, prepend=series[0])),
        "change of the change": np.abs(np.diff(series, 2, prepend=[series[0]] * 2)),
    }


def draw(picture: Path, generated: tuple, water: tuple | None, water_scores: np.ndarray | None) -> None:
    """Series and scores: a piece of the generated one, and all of the real one."""
    pyplot = require_pyplot()
    rows = 2 if water is None else 4
    figure, axes = pyplot.subplots(rows, 1, figsize=(7, 1.6 * rows))
    series, faulty, found = (part[-400:] for part in generated)
    axes[0].plot(series, linewidth=1)
    axes[0].plot(np.where(faulty, series, np.nan), ".", color="C3", markersize=5, label="after lost samples")
    axes[0].set(title="Lorenz's attractor, generated: the last 400 samples", ylabel="value", ylim=(-22, 38))
    axes[0].legend(frameon=False, loc="upper left")
    axes[1].plot(found, color="C1", linewidth=1)
    axes[1].set(ylabel="score", yscale="log", ylim=(1, None))
    if water is not None:
        axes[2].plot(water[1], linewidth=1)
        axes[2].set(title="Flow of water, hourly, March to May 2022", ylabel="liters / s")
        axes[3].plot(water_scores, color="C1", linewidth=1)
        axes[3].set(ylabel="score", yscale="log", ylim=(1, None))
    figure.tight_layout()
    figure.savefig(picture, dpi=75)


def main(argv=None) -> None:
    """Run the script with `argv`, by default the arguments of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=LENGTH, help="samples of the generated series")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="PNG (default: in docs/results)")
    arguments = parser.parse_args(argv)
    series, faulty = with_losses(lorenz(arguments.length))
    found, memory = scores(series)
    print(f"RAM and flash together: {memory:,} bytes")
    print(f"generated, {len(series):,} samples, {FAULTS} losses of {LOST}; area under the ROC curve:")
    half = len(series) // 2
    for name, values in {"learner in C": found, **baselines(series)}.items():
        print(f"  {name:<24}{area_under_curve(values[half:], faulty[half:]):.3f}")
    water, water_scores = water_flow(), None
    if water is None:
        print("The flow of water is left out: pip install river")
    else:
        water_scores, _ = scores(water[1])
        print(f"flow of water, {len(water[1]):,} hours: the eight highest scores after the first day")
        for place in sorted(24 + np.argsort(-water_scores[24:])[:8]):
            print(f"  {water[0][place]}  {water[1][place]:6.1f} l/s  score {water_scores[place]:,.0f}")
    draw(arguments.picture, (series, faulty, found), water, water_scores)


if __name__ == "__main__":
    main()
