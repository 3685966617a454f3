"""Processor time of experiments: recorded, and estimated for rows that have not run."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from hf_recurrent.reproduce.engine.experiment import Experiment, Settings
from hf_recurrent.reproduce.engine.rows_file import find_row, read_rows, rows_path
from hf_recurrent.reproduce.engine.tuning import tuning_rows


def core_seconds(row: Settings) -> float:
    """Processor time of a finished row; of older rows, the wall-clock time of training."""
    return row.get("core_seconds", row["seconds"])


def estimate(experiment: Experiment, rows: Sequence[Settings], finished: Sequence[Settings]) -> float:
    """Seconds that rows will take, by the finished rows of the same name, or else by the mean of all."""
    if not finished:
        return float("nan")
    total = statistics.fmean(map(core_seconds, finished))
    times: dict[str, list[float]] = {}
    for row in finished:
        times.setdefault(experiment.row_name(row), []).append(core_seconds(row))
    names = [experiment.row_name(row) for row in rows]
    return sum(statistics.fmean(times[name]) if name in times else total for name in names)


def in_words(seconds: float) -> str:
    """A duration with its unit."""
    if seconds != seconds:
        return "?"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def overview(experiments: Mapping[str, Experiment], size: str, output_dir: Path) -> str:
    """A Markdown table of all experiments: rows and seeds that are recorded, their time, and that of the others."""
    lines = ["| experiment | rows | recorded | core time | still to run |", "|---|---|---|---|---|"]
    recorded = missing_time = 0.0
    unknown = []
    for name, experiment in experiments.items():
        path = rows_path(experiment, size, output_dir)
        stored = read_rows(path)
        trials = read_rows(path.with_name(f"{path.stem}_tuning.json"))
        rows = [{**row, "seed": seed} for seed in experiment.default_seeds(size) for row in experiment.rows(size)]
        found = [row for settings in rows if (row := find_row(stored, settings)) is not None]
        missing = [settings for settings in rows if find_row(stored, settings) is None]
        spent = sum(map(core_seconds, [*found, *trials]))
        plain = [{key: value for key, value in row.items() if key != "seed"} for row in missing]
        tuning = {str(trial): trial for row in plain for trial in tuning_rows(experiment, size, row)}
        waiting = [row for row in tuning.values() if find_row(trials, row) is None]
        left = estimate(experiment, [*missing, *waiting], [*stored, *trials]) if missing else 0.0
        recorded += spent
        if left == left:
            missing_time += left
        else:
            unknown.append(name)
        lines.append(
            f"| {name} | {len(rows)} | {len(found)} | {in_words(spent)} | {in_words(left) if missing else '-'} |"
        )
    lines.append(f"| together | | | {in_words(recorded)} | {in_words(missing_time)} |")
    rest = f"\nNever run, so without an estimate: {', '.join(unknown)}.\n" if unknown else ""
    return "\n".join(lines) + "\n" + rest
