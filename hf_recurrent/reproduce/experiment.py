"""What an experiment is: rows that each train and measure one model, and how their measurements are shown."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Settings = dict[str, Any]
# Label of a line → place on the x axis (None without one) → the measurements of all seeds.
Curves = dict[str, dict[float | None, list[float]]]


class Experiment:
    """One table or figure of a paper, at the paper's size and at a small one that two cores finish.

    Attributes:
        name: what the user types.
        source: paper and table.
        claim: the statement that the rows check.
        metric: what is measured, with its unit.
        x_label: name of the x axis, or None for one number a line.
        logarithmic: whether the x axis is.
        percent: whether the measurements are fractions to be shown as percentages.
        scientific: whether they are shown as powers of ten, on a logarithmic axis.
        paper: label → the number that the paper prints.
    """

    name: str
    source: str
    claim: str
    metric: str
    x_label: str | None = None
    logarithmic: bool = False
    percent: bool = False
    scientific: bool = False
    paper: Mapping[str, str] = {}

    def rows(self, size: str) -> list[Settings]:
        """Settings of every row of `size`, "small" or "paper", without the seed: JSON values, with a `label` each."""
        raise NotImplementedError

    def run(self, settings: Settings) -> dict[str, Any]:
        """Train and measure one row, whose settings have a `seed`; JSON values, with the measurement as `value`: a
        number, or a dictionary from places on the x axis to numbers."""
        raise NotImplementedError

    def row_name(self, settings: Settings) -> str:
        """A row as the progress shows it."""
        return settings["label"]

    def note(self, rows: Sequence[Settings]) -> str:
        """One sentence on how the rows were made, for the report."""
        return ""

    def points(self, row: Settings) -> Iterator[tuple[str, Any, float]]:
        """What a row adds to table and plot: label of the line, place on the x axis or None, measurement."""
        values = row["value"] if isinstance(row["value"], dict) else {row.get("x"): row["value"]}
        for place, value in values.items():
            yield row["label"], place, value

    def curves(self, rows: Sequence[Settings]) -> Curves:
        """The lines of table and plot, in the order of the rows."""
        result: Curves = {}
        for row in rows:
            for label, place, value in self.points(row):
                line = result.setdefault(label, {})
                line.setdefault(None if place is None else float(place), []).append(value)
        return result

    def draw(self, axes: Any, rows: Sequence[Settings]) -> bool:
        """Draw on matplotlib axes what shows more than the table; False where the table itself is to be drawn."""
        return False

    def line_style(self, label: str) -> dict[str, Any]:
        """How matplotlib draws the line of a label, where colours in turn would not do."""
        return {}
