"""95 % intervals of a mean over seeds."""

import math
import statistics
from collections.abc import Sequence

# Two-sided 95 % quantiles of Student's t, by the number of values.
_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


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
