"""Table and plot of an experiment's rows, and its section in a page of results."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_recurrent.plotting import require_pyplot
from hf_recurrent.reproduce.experiment import Experiment, Settings
from hf_recurrent.reproduce.rows_file import write_text

# More lines than these have their legend beside the picture, more places than these no tick each.
_LEGEND_INSIDE, _TICKS = 6, 8


def markdown_table(experiment: Experiment, rows: Sequence[Settings]) -> str:
    """A line for each label, a column for each place on the x axis; with several seeds mean ± half the range."""
    curves = experiment.curves(rows)
    places = sorted({place for line in curves.values() for place in line if place is not None})
    columns = [f"{experiment.x_label} {place:g}" for place in places] or [experiment.metric]
    show_paper, parameters = bool(experiment.paper), _parameters(rows)
    header = ["", *columns, *(["paper"] if show_paper else []), *(["parameters"] if parameters else [])]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for label, line in curves.items():
        cells = [_cell(line.get(place), experiment) for place in (places or [None])]
        cells += [experiment.paper.get(label, "-")] if show_paper else []
        if parameters:
            # A row's label may begin those of several lines, and those of other rows.
            row = max((name for name in parameters if label.startswith(name)), key=len, default=None)
            cells.append(parameters.get(row, "-"))
        lines.append("| " + label.replace("|", r"\|") + " | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _parameters(rows: Sequence[Settings]) -> dict[str, str]:
    return {row["label"]: f"{row['num_parameters']:,}" for row in rows if "num_parameters" in row}


def _cell(values: list[float] | None, experiment: Experiment) -> str:
    if not values:
        return "-"
    scale, form = (100, ".1f") if experiment.percent else (1, ".1e" if experiment.scientific else ".3f")
    mean = statistics.fmean(values) * scale
    if len(values) == 1:
        return f"{mean:{form}}"
    return f"{mean:{form}} ± {(max(values) - min(values)) / 2 * scale:{form}}"


def command_line(
    experiment: Experiment, size: str, seeds: Sequence[int], only: Sequence[str], overrides: Mapping[str, Any]
) -> str:
    """The command that made the rows; the reader has files in a folder of their own."""
    words = ["python", "scripts/reproduce.py", experiment.name]
    words += [] if size == "small" else ["--size", size]
    words += [] if list(seeds) == [0] else ["--seeds", *map(str, seeds)]
    words += ["--only", *only] if only else []
    values = {key: "FOLDER" if Path(str(value)).is_absolute() else value for key, value in overrides.items()}
    words += ["--override", *(f"{key}={value}" for key, value in values.items())] if overrides else []
    return shlex.join(words)


def section(experiment: Experiment, size: str, rows: Sequence[Settings], picture: str, command: str) -> str:
    """The part of the page of results that belongs to an experiment: claim, command, table, picture."""
    seeds = len({row["seed"] for row in rows})
    minutes = sum(row["seconds"] for row in rows) / 60
    devices = ", ".join(sorted({row["device"] for row in rows}))
    note = experiment.note(rows)
    metric = experiment.metric + (", per cent" if experiment.percent else "")
    spread = f"{seeds} seeds, mean ± half the range" if seeds > 1 else "1 seed"
    return (
        f"## {experiment.source}: {experiment.name}\n\nTo be checked: {experiment.claim}\n\n"
        f"<!-- not run in the tests: minutes -->\n```bash\n{command}\n```\n\n"
        f"{metric[0].upper()}{metric[1:]}; {spread}; {size} size, {minutes:.0f} minutes of training on {devices}."
        f"{' ' + note if note else ''}\n\n{markdown_table(experiment, rows)}\n![{experiment.name}]({picture})\n"
    )


def update_section(page: Path, key: str, text: str) -> None:
    """Replace what stands between the markers of `key` in a page, or append it with markers of its own."""
    begin, end = f"<!-- reproduce: {key} -->\n", f"<!-- end of {key} -->\n"
    content = page.read_text(encoding="utf-8")
    if begin in content and end in content:
        head, rest = content.split(begin, 1)
        content = head + begin + text + end + rest.split(end, 1)[1]
    else:
        content = content.rstrip("\n") + "\n\n" + begin + text + end
    write_text(content, page)


def plot(experiment: Experiment, rows: Sequence[Settings], path: Path) -> None:
    """The picture of an experiment: its own, or the table's lines over the x axis, or one bar a label."""
    pyplot = require_pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    if not experiment.draw(axes, rows):
        draw_table(experiment, rows, axes)
    for each in figure.axes:
        each.grid(alpha=0.3)
    figure.suptitle(experiment.source, fontsize="medium")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_table(experiment: Experiment, rows: Sequence[Settings], axes: Any) -> None:
    """The table's lines on matplotlib axes, or one bar a label, all seeds as points.

    Values that lie close together get no bars, which would have to begin at zero.
    """
    curves = experiment.curves(rows)
    scale = 100 if experiment.percent else 1
    label_axis = experiment.metric + (" (%)" if experiment.percent else "")
    if experiment.x_label is None:
        labels = list(curves)
        everything = [value for line in curves.values() for value in line[None]]
        close = min(everything) > max(everything) / 2
        for place, label in enumerate(labels):
            values = [value * scale for value in curves[label][None]]
            if close:
                axes.plot(statistics.fmean(values), place, "|", color="tab:blue", markersize=18, markeredgewidth=3)
            else:
                axes.barh(place, statistics.fmean(values), color="tab:blue", alpha=0.6)
            axes.plot(values, [place] * len(values), "o", color="black", markersize=3)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.set_xlabel(label_axis)
    else:
        for label, line in curves.items():
            places = sorted(line)
            means = [statistics.fmean(line[place]) * scale for place in places]
            axes.plot(places, means, label=label, **{"marker": "o", **experiment.line_style(label)})
        if experiment.logarithmic:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        ticks = sorted({place for line in curves.values() for place in line})
        if len(ticks) <= _TICKS:
            axes.set_xticks(ticks)
        if experiment.scientific:
            axes.set_yscale("log")
        axes.set_xlabel(experiment.x_label)
        axes.set_ylabel(label_axis)
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(curves) > _LEGEND_INSIDE else {}
        axes.legend(fontsize="small", **beside)
