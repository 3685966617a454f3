"""Processor time of finished rows, and durations in words."""

from papers.engine.experiment import Settings


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
