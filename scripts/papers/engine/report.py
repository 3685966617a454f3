"""Table and plot of an experiment's rows, and its section in a page of results."""

import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.rows_file import write_text
from papers.engine.tables import core_seconds, half_width, markdown


def markdown_table(experiment: Experiment, rows: Sequence[Settings]) -> str:
    """One line per label, one column per place on the x axis; with several seeds mean ± half its 95 % interval.

    An experiment may have a table of its own.
    """
    if (table := experiment.own_table(rows)) is not None:
        return table
    curves = experiment.curves(rows)
    places = sorted({place for line in curves.values() for place in line if place is not None})
    details: dict[str, dict[str, str]] = {}
    for label in dict.fromkeys(row["label"] for row in rows):
        details[label] = experiment.details([row for row in rows if row["label"] == label])
    further = list(dict.fromkeys(column for cells in details.values() for column in cells))
    header = ["", *([f"{experiment.x_label} {place:g}" for place in places] or [experiment.metric])]
    differences = _differences(experiment, rows)
    paired = [f"minus {experiment.reference}, seed by seed"] if differences else []
    has_paper = not experiment.paper.keys().isdisjoint(curves)
    header += [*(["paper"] if has_paper else []), *paired, *further]
    lines = [header]
    for label, line in curves.items():
        cells = [label.replace("|", r"\|"), *(_cell(line.get(place), experiment) for place in (places or [None]))]
        cells += [experiment.paper.get(label, "-")] if has_paper else []
        cells += [_cell(differences.get(label), experiment, signed=True)] if paired else []
        # The label of a row may be a prefix of several lines' labels, and of other rows' labels.
        row = max((name for name in details if label.startswith(name)), key=len, default=None)
        cells += [details.get(row, {}).get(column, "-") for column in further]
        lines.append(cells)
    return markdown(lines)


def _differences(experiment: Experiment, rows: Sequence[Settings]) -> dict[str, list[float]]:
    """Label → its value minus the value of the experiment's reference, for each seed that has both."""
    values: dict[str, dict[int, float]] = {}
    for row in rows:
        for label, _, value in experiment.points(row):
            values.setdefault(label, {})[row["seed"]] = value
    base = values.get(experiment.reference, {})
    pairs = {label: [line[seed] - base[seed] for seed in line if seed in base] for label, line in values.items()}
    return {label: pair for label, pair in pairs.items() if pair and label != experiment.reference}


def _cell(values: list[float] | None, experiment: Experiment, signed: bool = False) -> str:
    if not values:
        return "-"
    scale, form, mean, half = experiment.scale, experiment.form, statistics.fmean(values), half_width(values)
    cell = f"{mean * scale:{form}}" + ("" if half is None else f" ± {half * scale:{form}}")
    return f"+{cell}" if signed and mean > 0 else cell


def command_line(
    experiment: Experiment, size: str, seeds: Sequence[int], only: Sequence[str], overrides: Mapping[str, Any]
) -> str:
    """The command that made the rows, with FOLDER in place of absolute paths."""
    words = ["python", "scripts/reproduce.py", experiment.name]
    words += [] if size == "small" else ["--size", size]
    words += [] if list(seeds) == experiment.default_seeds(size) else ["--seeds", *map(str, seeds)]
    words += ["--only", *only] if only else []
    values = {key: "FOLDER" if Path(str(value)).is_absolute() else value for key, value in overrides.items()}
    words += ["--override", *(f"{key}={value}" for key, value in values.items())] if overrides else []
    return shlex.join(words)


class _Values(list):
    """All rows, or one setting of those that have it, which formats as its different values, joined by "or"."""

    def __init__(self, values: Iterable[Any]):
        super().__init__(each for value in values for each in (value if isinstance(value, list) else [value]))

    def __getitem__(self, key: Any) -> "_Values":
        return _Values(value[key] for value in self if key in value)

    def __format__(self, spec: str) -> str:
        return " or ".join(dict.fromkeys(format(value, spec) for value in self)) or "-"


def filled_note(experiment: Experiment, rows: Sequence[Settings]) -> str:
    """The experiment's note with the settings of its rows."""
    return experiment.note.format_map(_Values(rows))


def section(experiment: Experiment, size: str, rows: Sequence[Settings], picture: str, command: str) -> str:
    """An experiment's section in the page of results: claim, command, note, table, picture."""
    seeds = len({row["seed"] for row in rows})
    minutes = sum(map(core_seconds, rows)) / 60  # next to other programs, or interrupted, a row takes any time
    devices = ", ".join(sorted({row["device"] for row in rows}))
    metric = experiment.metric + (", per cent" if experiment.percent else "")
    spread = (
        f"{seeds} seeds" + (", mean ± half its 95 % interval" if experiment.own_table(rows) is None else "")
        if seeds > 1
        else "1 seed"
    )
    return (
        f"## {experiment.source}: {experiment.name}\n\nClaim to be checked: {experiment.claim}\n\n"
        f"<!-- not run in the tests: minutes -->\n```bash\n{command}\n```\n\n"
        f"{metric[0].upper()}{metric[1:]}; {spread}; {size} size, {minutes:.0f} min of training on {devices}. "
        f"{filled_note(experiment, rows)}\n\n{markdown_table(experiment, rows)}\n![{experiment.name}]({picture})\n"
    )


def update_section(page: Path, key: str, text: str) -> None:
    """Replace the text between the markers of `key` in a page, or append it with new markers."""
    begin, end = f"<!-- reproduce: {key} -->\n", f"<!-- end of {key} -->\n"
    content = page.read_text(encoding="utf-8")
    if begin in content and end in content:
        head, rest = content.split(begin, 1)
        content = head + begin + text + end + rest.split(end, 1)[1]
    else:
        content = content.rstrip("\n") + "\n\n" + begin + text + end
    write_text(content, page)


def write_report(experiment: Experiment, rows: Sequence[Settings], path: Path) -> str:
    """Write an experiment's table, with its plot next to it; return the table."""
    table = markdown_table(experiment, rows)
    write_text(table, path)
    plot(experiment, rows, path.with_suffix(".png"))
    return table


def plot(experiment: Experiment, rows: Sequence[Settings], path: Path) -> None:
    """Save the experiment's figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    experiment.draw(axes, rows)
    for each in figure.axes:
        if not each.images:
            each.grid(alpha=0.3)
    figure.suptitle(experiment.source, fontsize="medium")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    with Image.open(path) as image:  # a palette: a third of the size
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
