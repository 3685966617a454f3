"""Import of matplotlib, an optional dependency."""

from typing import Any


def require_pyplot() -> Any:
    """matplotlib's pyplot without a display; raise an ImportError that says how to install it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('Plots need matplotlib: pip install "hf-recurrent[plots]".') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
