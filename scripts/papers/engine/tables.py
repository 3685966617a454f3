"""Cells of tables: means with 95 % intervals, processor time, durations."""

import math
import statistics
from collections.abc import Sequence

from papers.engine.experiment import Settings

# Two-sided 95 % quantiles of Student's t, by the number of values.
_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table of lines of cells, of which the first is the header."""
    texts = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([texts[0], "|" + "---|" * len(lines[0]), *texts[1:]]) + "\n"


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean by Student's t of 2 to 10 values; None of one.

    Raises:
        KeyError: more values than the table of quantiles has.
    """
    if len(values) < 2:
        return None
    return _QUANTILES[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def confidence_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the mean, see [`half_width`]; None of one value."""
    half, mean = half_width(values), statistics.fmean(values)
    return None if half is None else (mean - half, mean + half)


def in_interval(values: Sequence[float], form: str = ".3f") -> str:
    """The mean with its 95 % interval, without it of one value; "-" of none or of a NaN."""
    if not values or any(value != value for value in values):
        return "-"
    bounds = confidence_interval(values)
    return f"{statistics.fmean(values):{form}}" + (f" [{bounds[0]:{form}}, {bounds[1]:{form}}]" if bounds else "")


def core_seconds(row: Settings) -> float:
    """Processor time of a finished row; of older rows, the wall-clock time of training."""
    return row.get("core_seconds", row["seconds"])


def in_words(seconds: float) -> str:
    """A duration with its unit."""
    if seconds != seconds:
        return "?"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
