"""An experiment: rows that each train and measure one model, and how their measurements are shown."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Settings = dict[str, Any]
# Label of a line → place on the x axis (None without one) → the measurements of all seeds.
Curves = dict[str, dict[float | None, list[float]]]
# With more lines than this the legend is outside the axes; with more places, matplotlib chooses the ticks.
_LEGEND_INSIDE, _TICKS = 6, 8


class Experiment:
    """One table or figure of a paper, at the paper's size and at a small one that two cores finish.

    Attributes:
        name: as the user types it.
        source: paper and table.
        claim: the statement that the rows check.
        note: how the rows were made. Placeholders such as `{steps:,}` stand for settings and results of the rows.
        metric: the measurement, with its unit.
        lines: label → settings of its row, for the default [`rows`]; they take precedence over the size's.
        sizes: "small" and "paper" → settings of all rows of that size.
        shared: settings of all rows of both sizes.
        x_label: name of the x axis, or None for one number per line.
        x_key: the setting that places a row on the x axis, in rows that have it.
        part_label: label of the line of each entry of `value`, such as "{label}, {part}"; without it, the keys of
            `value` are places on the x axis.
        log_x, log_y: logarithmic axes.
        styles: part of a line's label → arguments of matplotlib's `plot`; the last that is there takes precedence.
        percent: show measurements, which are fractions, as percentages.
        number_format: of a measurement in the table, without `percent`; by default ".3f".
        paper: label → the number that the paper prints.
        seeds: of the small size, by default; each row runs once per seed. A single one, where three seeds of all
            experiments would not fit into eight hours of a core together.
        tuning: size → settings that replace a row's while its candidates are compared, such as fewer steps.
        reference: label of the row from which the other rows' values are subtracted, seed by seed, in a column.
        paper_seeds: number of runs of each row in the paper, and by default at its size.
        optional: settings that only rows of a study of causes have.
        rows_of: name of the experiment whose file has the rows; None for a file of its own.
    """

    name: str
    source: str
    claim: str
    note: str
    metric: str
    lines: Mapping[str, Settings]
    sizes: Mapping[str, Settings]
    shared: Mapping[str, Any] = {}
    x_label: str | None = None
    x_key: str = "x"
    part_label: str | None = None
    log_x: bool = False
    log_y: bool = False
    styles: Mapping[str, Mapping[str, str]] = {}
    percent: bool = False
    number_format: str | None = None
    paper: Mapping[str, str] = {}
    seeds: Sequence[int] = (0, 1, 2)
    tuning: Mapping[str, Settings] = {}
    reference: str | None = None
    paper_seeds: int = 1
    optional: Sequence[str] = ()
    rows_of: str | None = None

    @property
    def scale(self) -> int:
        """Factor of measurements in table and plot."""
        return 100 if self.percent else 1

    @property
    def form(self) -> str:
        """Format of measurements in the table."""
        return ".1f" if self.percent else self.number_format or ".3f"

    def rows(self, size: str) -> list[Settings]:
        """Settings of every row of `size`, "small" or "paper", without the seed: JSON values, with a `label` each.

        `candidates` of a row are settings, such as learning rates, of which the best are chosen before it runs. A
        comparison is fair if all rows have equally many.
        """
        return [{"label": label, **self.size_settings(size), **own} for label, own in self.lines.items()]

    def size_settings(self, size: str) -> Settings:
        """Settings of all rows of `size`."""
        return {**self.shared, **self.sizes[size]}

    def run(self, settings: Settings) -> dict[str, Any]:
        """Train and measure one row, whose settings have a `seed`.

        Returns:
            JSON values, with the measurement as `value`: a number, or a dictionary from places on the x axis (or from
            names of lines, see `part_label`) to numbers.
        """
        raise NotImplementedError

    def default_seeds(self, size: str) -> list[int]:
        """Seeds of the rows of `size` unless others are given."""
        return list(range(self.paper_seeds) if size == "paper" else self.seeds)

    def tuning_loss(self, row: Settings) -> float:
        """The number by which candidates are compared, of a finished row: the smallest is the best."""
        values = [value for _, _, value in self.points(row)]
        return -sum(values) if self.percent else sum(values)

    def row_name(self, settings: Settings) -> str:
        """Name of a row in the progress output."""
        place = settings.get(self.x_key)
        return settings["label"] + ("" if place is None else f", {self.x_label} {place:g}")

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        """Points of a row in table and plot: label of the line, place on the x axis or None, measurement."""
        place, value = row.get(self.x_key), row["value"]
        for key, number in value.items() if isinstance(value, dict) else [(place, value)]:
            if self.part_label is None:
                yield row["label"], key, number
            else:
                yield self.part_label.format(label=row["label"], part=key), place, number

    def curves(self, rows: Sequence[Settings]) -> Curves:
        """The lines of table and plot, in the order of the rows."""
        result: Curves = {}
        for row in rows:
            for label, place, value in self.points(row):
                line = result.setdefault(label, {})
                line.setdefault(None if place is None else float(place), []).append(value)
        return result

    def details(self, rows: Sequence[Settings]) -> dict[str, str]:
        """Further columns of the table → cells, of all rows with one label."""
        return {"parameters": f"{rows[-1]['num_parameters']:,}"} if "num_parameters" in rows[-1] else {}

    def own_table(self, rows: Sequence[Settings]) -> str | None:
        """A Markdown table of the experiment's own, or None."""
        return None

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """Draw the table on matplotlib axes: lines over the x axis, or one bar per label; or a figure of one's own."""
        lines = {
            label: {place: [value * self.scale for value in values] for place, values in line.items()}
            for label, line in self.curves(rows).items()
        }
        draw = _draw_bars if self.x_label is None else self._draw_lines
        draw(axes, lines, self.metric + (" (%)" if self.percent else ""))

    def _draw_lines(self, axes: Any, lines: Curves, axis_label: str) -> None:
        for label, line in lines.items():
            places = sorted(line)
            found = (style for part, style in self.styles.items() if part in label)
            style = {key: value for each in found for key, value in each.items()}
            means = [statistics.fmean(line[place]) for place in places]
            axes.plot(places, means, label=label, **{"marker": "o", **style})
        if self.log_x:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        ticks = sorted({place for line in lines.values() for place in line})
        if len(ticks) <= _TICKS:
            axes.set_xticks(ticks)
        if self.log_y:
            axes.set_yscale("log")
        axes.set(xlabel=self.x_label, ylabel=axis_label)
        outside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(lines) > _LEGEND_INSIDE else {}
        axes.legend(fontsize="small", **outside)


def _draw_bars(axes: Any, lines: Curves, axis_label: str) -> None:
    """One bar per label, all seeds as points; values close together get no bars, which would have to begin at zero."""
    everything = [value for line in lines.values() for value in line[None]]
    close = min(everything) > max(everything) / 2
    for place, line in enumerate(lines.values()):
        if close:
            axes.plot(statistics.fmean(line[None]), place, "|", color="tab:blue", markersize=18, markeredgewidth=3)
        else:
            axes.barh(place, statistics.fmean(line[None]), color="tab:blue", alpha=0.6)
        axes.plot(line[None], [place] * len(line[None]), "o", color="black", markersize=3)
    axes.set_yticks(range(len(lines)), list(lines))
    axes.invert_yaxis()
    axes.set_xlabel(axis_label)
