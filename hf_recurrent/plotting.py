"""Import of matplotlib, an optional dependency."""

from typing import Any

from hf_recurrent.argument_checks import import_optional


def require_pyplot() -> Any:
    """matplotlib's pyplot without a display; raise an ImportError that says how to install it."""
    matplotlib = import_optional("matplotlib", 'Plots need matplotlib: pip install "hf-recurrent[plots]".')
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
