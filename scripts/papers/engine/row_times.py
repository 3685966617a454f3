"""Processor time of rows before they have run, from a few of their optimizer steps."""

import itertools
import json
import math
import time
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from papers.engine.experiment import Experiment, Settings
from papers.engine.rows_file import write_text
from papers.engine.tuning import tuning_rows, untuned

# The first step is not counted: it allocates memory and fills caches.
_STEPS = 3
# Settings that say how long a row trains.
_LENGTHS = ("steps", "bytes", "epochs")
# Experiment → key of a row → `row`, its name, `seconds`, and `candidate_seconds` if candidates are compared.
Times = dict[str, dict[str, dict[str, Any]]]
_current: ContextVar["ShortTrainings | None"] = ContextVar("short trainings", default=None)


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
    entry = {"row": experiment.row_name(row), "seconds": row_seconds(experiment, untuned(row) | {"seed": 0})}
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
