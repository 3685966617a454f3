"""Causes: two measurements of an experiment compared again, with one setting at a time changed."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from papers.engine.experiment import Experiment, Settings
from papers.engine.tables import confidence_interval, core_seconds, in_interval, in_words

AS_RECORDED = "as recorded"
# Label of a point, and its place on the x axis or None.
Point = tuple[str, str | None]


@dataclass(eq=False, kw_only=True)
class FactorStudy(Experiment):
    """Two points of an experiment and their difference, as recorded and with one setting at a time changed.

    The rows stand in the file of the experiment, so that its own rows are not run again.

    Args:
        name: as the user types it.
        rows_of: name of the experiment.
        claim: the question.
        first, second: the points, each a label and, where the x axis has places, a place; the difference is second
            minus first, seed by seed.
        factors: factor → level → settings that replace a row's; those that are tables, such as `options`, replace
            the entries that they have.
        fixed: label of a row of the experiment → settings in place of its candidates; other rows are left out.
        where: settings that a row of the experiment must have, where several have one label.
        affected: factor → labels of the rows that it changes, by default all; the others are as recorded.
        key, metric: what is compared in place of the experiment's measurement: a number that its rows have, and its
            name.
        seeds: each row runs once per seed.
    """

    name: str
    rows_of: str
    claim: str
    first: Sequence[str]
    second: Sequence[str]
    fixed: Mapping[str, Settings]
    factors: Mapping[str, Mapping[str, Settings]] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    affected: Mapping[str, Sequence[str]] = field(default_factory=dict)
    key: str | None = None
    metric: str | None = None
    seeds: Sequence[int] = (0, 1, 2)

    def __post_init__(self) -> None:
        self.first, self.second = ((*point, None)[:2] for point in (self.first, self.second))
        self.note = f"One setting at a time is changed; all others are as in `{self.rows_of}`."

    def attach(self, base: Experiment) -> None:
        """Set the experiment, whose source and measurement the study has."""
        self.base, self.source, self.percent, self.number_format = base, base.source, base.percent, base.number_format
        self.metric = self.metric or base.metric

    def rows(self, size: str) -> list[Settings]:
        """The experiment's rows, then the rows of each level, which have `level` in addition.

        Raises:
            ValueError: a size without studies, or a level with a setting that a row does not have.
        """
        if size != "small":
            raise ValueError(f"size is {size!r}; `{self.name}` has the size 'small' only.")
        plain = [
            row for row in self.base.rows(size) if row["label"] in self.fixed and self.where.items() <= row.items()
        ]
        return plain + [
            self._at_level(row, f"{factor} {level}", settings)
            for factor, levels in self.factors.items()
            for level, settings in levels.items()
            for row in plain
            if row["label"] in self.affected.get(factor, self.fixed)
        ]

    def _at_level(self, row: Settings, level: str, settings: Settings) -> Settings:
        own = {key: value for key, value in row.items() if key != "candidates"} | self.fixed[row["label"]]
        if unknown := settings.keys() - own.keys() - set(self.base.optional):
            raise ValueError(
                f"{level!r} of `{self.name}` sets {sorted(unknown)}, which {row['label']!r} does not have."
            )
        tables = {key: {**own.get(key, {}), **value} for key, value in settings.items() if isinstance(value, dict)}
        return {**own, **settings, **tables, "level": level}

    def run(self, settings: Settings) -> dict[str, Any]:
        return self.base.run(settings)

    def row_name(self, settings: Settings) -> str:
        return f"{self.base.row_name(settings)}, {settings.get('level', AS_RECORDED)}"

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        return iter([(row["label"], None, row[self.key])]) if self.key else self.base.points(row)

    def levels(self, rows: Sequence[Settings]) -> dict[str, list[Settings]]:
        """Level → its rows, and as recorded those that it does not affect, in the order of the study."""
        recorded = [row for row in rows if "level" not in row]
        result = {AS_RECORDED: recorded}
        for factor, levels in self.factors.items():
            kept = [row for row in recorded if row["label"] not in self.affected.get(factor, self.fixed)]
            for level in levels:
                own = [row for row in rows if row.get("level") == f"{factor} {level}"]
                result[f"{factor} {level}"] = own + kept
        return result

    def pairs(self, rows: Sequence[Settings]) -> list[tuple[float, float]]:
        """(first, second) of each seed that has both."""
        found: dict[int, dict[Point, float]] = {}
        for row in rows:
            for label, place, value in self.points(row):
                found.setdefault(row["seed"], {})[label, None if place is None else str(place)] = value
        return [
            (each[self.first], each[self.second])
            for each in found.values()
            if {self.first, self.second} <= each.keys()
        ]

    def differences(self, rows: Sequence[Settings]) -> list[float]:
        """Second minus first of each seed that has both, in the unit of the table."""
        return [(second - first) * self.scale for first, second in self.pairs(rows)]

    def own_table(self, rows: Sequence[Settings]) -> str:
        """One line per level: both measurements, their difference with its 95 % interval, seeds, processor time."""
        names = [label if place is None else f"{label}, {place}" for label, place in (self.first, self.second)]
        lines = [
            "| | " + " | ".join(names) + " | difference, 95 % interval | seeds | core time |",
            "|---|---|---|---|---|---|",
        ]
        for level, own in self.levels(rows).items():
            pairs = self.pairs(own)
            if not pairs:
                continue
            means = [f"{statistics.fmean(side) * self.scale:{self.form}}" for side in zip(*pairs, strict=True)]
            spread = in_interval(self.differences(own), f"+{self.form}")
            time = in_words(sum(map(core_seconds, own)))
            lines.append(f"| {level} | {' | '.join([*means, spread, str(len(pairs)), time])} |")
        return "\n".join(lines) + "\n"

    def draw(self, axes: Any, rows: Sequence[Settings]) -> None:
        """The difference at each level: the seeds, their mean and its interval."""
        found = {level: self.differences(own) for level, own in self.levels(rows).items()}
        levels = {level: values for level, values in found.items() if values}
        for place, values in enumerate(levels.values()):
            axes.plot(values, [place] * len(values), "o", color="black", markersize=3)
            low, high = confidence_interval(values) or (values[0], values[0])
            axes.plot([low, high], [place, place], color="tab:blue", linewidth=2)
            axes.plot(statistics.fmean(values), place, "|", color="tab:blue", markersize=18, markeredgewidth=3)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(levels)), list(levels))
        axes.invert_yaxis()
        unit = self.metric + (" (points)" if self.percent else "")
        # Below the whole figure, as the names may be longer than the axes.
        text = f"{self.second[0]}\nminus {self.first[0]}\n{unit}"
        axes.figure.supxlabel(text, fontsize="small")
