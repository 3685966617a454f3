"""The training curve of a model card; without matplotlib there is none."""

import os

from hf_recurrent.checkpoints.records import Phase, Provenance
from hf_recurrent.plotting import require_pyplot

CURVE_FILE = "training_curve.png"
_OF_TRAINING = {"smt": "teacher's prediction", "dmt": "readout", "bptt": "training"}


def plot_training_curve(provenance: Provenance, path: str | os.PathLike) -> bool:
    """Plot training and held-out bits per token of all phases over the tokens read; False if nothing was plotted."""
    if not any(len(phase.curve) > 1 for phase in provenance.phases):
        return False
    try:
        pyplot = require_pyplot()
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    unit, before = provenance.phases[-1].data[0].unit, 0
    for number, phase in enumerate(provenance.phases, 1):
        label = f"{number}. {phase.method}: {_OF_TRAINING.get(phase.method, 'while learning')}"
        if phase.curve:
            axes.plot([before + read for read, _ in phase.curve], [bits for _, bits in phase.curve], label=label)
        points = _held_out(provenance, number, phase, before)
        if points:
            axes.plot(*zip(*points, strict=True), "o", markersize=4, label=f"{number}. held out")
        before += phase.read
    axes.set(xlabel=f"{unit}s read", ylabel=f"bits per {unit}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _held_out(provenance: Provenance, number: int, phase: Phase, before: int) -> list[tuple[float, float]]:
    """(tokens read, bits) of the evaluations in a phase."""
    return [
        (before + phase.read * result.step / max(phase.steps, 1), result.metrics["bits_per_byte"])
        for result in provenance.results
        if result.phase == number and "bits_per_byte" in result.metrics
    ]
