"""Processor time of experiments: recorded, and of rows that have not run estimated from a few of their steps."""

import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from papers.engine.experiment import Experiment, Settings
from papers.engine.rows_file import find_row, found_rows, read_rows, row_key, rows_path, tuning_path, write_text
from papers.engine.tables import core_seconds, in_words
from papers.engine.tuning import tuned, tuning_rows

# The first step is not counted: it allocates memory and fills caches.
_STEPS = 3
# Settings that say how long a row trains.
_LENGTHS = ("steps", "bytes", "epochs")
# Experiment → key of a row → `row`, its name, `seconds`, and `candidate_seconds` if candidates are compared.
Times = dict[str, dict[str, dict[str, Any]]]
_current: ContextVar["ShortTrainings | None"] = ContextVar("short trainings", default=None)


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


class RowsOfASize:
    """Rows of an experiment at one size: recorded, and the processor time of all.

    Args:
        times: key of a row → its estimate.

    Attributes:
        rows: settings with seeds.
        found: finished rows.
        recorded: seconds of the finished rows and comparisons of candidates.
        left: seconds of the others, by the estimates, or else by their mean, or else by other finished rows; NaN if
            there is none of these.
        whole: seconds of all rows and comparisons.
    """

    def __init__(self, experiment: Experiment, size: str, output_dir: Path, times: Mapping[str, Any]):
        path = rows_path(experiment, size, output_dir)
        stored = read_rows(path)
        trials = read_rows(tuning_path(path))
        plain = experiment.rows(size)
        self.rows = [{**row, "seed": seed} for seed in experiment.default_seeds(size) for row in plain]
        self.found = found_rows(stored, self.rows)
        # Each comparison runs once for all seeds, and once for all rows that share it.
        candidates = {str(trial): (row, trial) for row in plain for trial in tuning_rows(experiment, size, row)}
        spent = {key: find_row(trials, trial) for key, (_, trial) in candidates.items()}
        needed = len(self.found) < len(self.rows)
        self.recorded = sum(map(core_seconds, [*self.found, *trials]))
        self.left = self.whole = 0.0
        for row in self.rows:
            finished = find_row(stored, row)
            expected = _estimated(times, row, "seconds") or estimate(experiment, [row], [*stored, *trials])
            self.left += expected if finished is None else 0.0
            self.whole += finished.get("core_seconds", expected) if finished else expected
        for key, (row, trial) in candidates.items():
            expected = _estimated(times, row, "candidate_seconds") or estimate(experiment, [trial], trials or stored)
            self.left += expected if needed and spent[key] is None else 0.0
            self.whole += core_seconds(spent[key]) if spent[key] else expected


def _estimated(times: Mapping[str, Any], row: Settings, key: str) -> float | None:
    """The estimate for a row, or the mean of the estimates of others; None if there are none."""
    if (entry := times.get(row_key({name: value for name, value in row.items() if name != "seed"}))) is not None:
        return entry[key]
    # Estimates of rows that had no candidates then have no `candidate_seconds`.
    others = [entry[key] for entry in times.values() if key in entry]
    return statistics.fmean(others) if others else None


def overview(experiments: Mapping[str, Experiment], size: str, output_dir: Path) -> str:
    """A Markdown table of all experiments: rows and seeds that are recorded, their time, the others', and all."""
    lines = ["| experiment | rows | recorded | core time | still to run | all rows |", "|---|---|---|---|---|---|"]
    times = read_times(size, output_dir)
    sizes = {name: RowsOfASize(each, size, output_dir, times.get(name, {})) for name, each in experiments.items()}
    unknown = [name for name, each in sizes.items() if each.whole != each.whole]
    known = [each for name, each in sizes.items() if name not in unknown]
    for name, each in sizes.items():
        left = in_words(each.left) if len(each.found) < len(each.rows) else "-"
        cells = [f"{len(each.rows)}", f"{len(each.found)}", in_words(each.recorded), left, in_words(each.whole)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    recorded = sum(each.recorded for each in sizes.values())
    left, whole = sum(each.left for each in known), sum(each.whole for each in known)
    lines.append(f"| together | | | {in_words(recorded)} | {in_words(left)} | {in_words(whole)} |")
    rest = f"\nNever run, so without an estimate: {', '.join(unknown)}.\n" if unknown else ""
    return "\n".join(lines) + "\n" + rest


class ShortTrainings(TrainerCallback):
    """Ends trainings after a few steps.

    Attributes:
        seconds_left_out: processor time of the steps and evaluations that were left out.
    """

    def __init__(self) -> None:
        self.seconds_left_out = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends.append(time.process_time())
        control.should_training_stop |= state.global_step >= _STEPS

    def count(self, trainer: Any) -> None:
        """Add what the whole training of a trainer would have taken beyond the steps that were trained."""
        trained, steps, args = trainer.state.global_step, trainer.args.max_steps, trainer.args
        # The fastest step but the first, since others are slowed by other processes.
        seconds = min((end - begin for begin, end in itertools.pairwise(self._ends)), default=0.0)
        self.seconds_left_out += (steps - trained) * seconds
        if args.eval_strategy == "steps":
            begin = time.process_time()
            trainer.evaluate()
            self.seconds_left_out += (steps // args.eval_steps - 1) * (time.process_time() - begin)


def short_trainings() -> ShortTrainings | None:
    """The callback that shortens trainings at present, or None outside of [`row_seconds`]."""
    return _current.get()


def row_seconds(experiment: Experiment, settings: Settings) -> float:
    """Estimate the processor time of a row with a `seed`, from its first steps and its whole evaluation."""
    trainings = ShortTrainings()
    token = _current.set(trainings)
    try:
        begin = time.process_time()
        experiment.run(settings)
        return round(time.process_time() - begin + trainings.seconds_left_out, 2)
    finally:
        _current.reset(token)


def time_row(experiment: Experiment, size: str, row: Settings) -> dict[str, Any]:
    """`row`, `seconds`, and `candidate_seconds` where candidates are compared, in proportion to the length of their
    training; of a row without seed."""
    seconds = row_seconds(experiment, tuned(experiment, row, []) | {"seed": 0})
    entry = {"row": experiment.row_name(row), "seconds": seconds}
    candidates = tuning_rows(experiment, size, row)
    if candidates:
        lengths = [(candidates[0][key], row[key]) for key in _LENGTHS if key in row]
        share = math.prod(shorter / whole for shorter, whole in lengths)
        entry["candidate_seconds"] = round(entry["seconds"] * share, 2)
    return entry


def times_path(size: str, output_dir: Path) -> Path:
    """The file of the times of all experiments' rows."""
    return output_dir / f"row_times_{size}.json"


def read_times(size: str, output_dir: Path) -> Times:
    """The estimated times; empty if there is no file."""
    path = times_path(size, output_dir)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_times(times: Mapping[str, Any], size: str, output_dir: Path) -> None:
    """Write the estimated times."""
    write_text(json.dumps(times, indent=1, ensure_ascii=False) + "\n", times_path(size, output_dir))
