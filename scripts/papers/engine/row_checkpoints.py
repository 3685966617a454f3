"""Progress and checkpoints of a row's training; a row that was cut off continues from its last checkpoint."""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import TrainerCallback

from papers.engine.rows_file import write_text

# Short rows write none.
SECONDS_BETWEEN_CHECKPOINTS = 600.0
_SECONDS_BETWEEN_LINES = 60.0
_LAST = "last.json"
_current: ContextVar["RowCheckpoints | None"] = ContextVar("row checkpoints", default=None)


class RowCheckpoints:
    """A folder for each training of a row, in the order in which they begin."""

    def __init__(self, folder: Path, row_name: str):
        self.row_name = row_name
        self._folder, self._trainings = folder, 0

    def next_training(self) -> Path:
        """The folder of the row's next training."""
        self._trainings += 1
        return self._folder / f"training-{self._trainings}"


@contextmanager
def row_checkpoints(folder: Path, row_name: str) -> Iterator[bool]:
    """Keep the checkpoints of the trainings inside the block in `folder`, and remove it when the block succeeds.

    Args:
        row_name: name of the row in the lines of progress.

    Yields:
        False if another process works on this row, whose checkpoints are then left alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    token = _current.set(RowCheckpoints(folder, row_name))
    try:
        yield True
        shutil.rmtree(folder)
        Path(lock.lock_file).unlink(missing_ok=True)  # while it is held
    finally:
        _current.reset(token)
        lock.release()


def current_checkpoints() -> RowCheckpoints | None:
    """The checkpoints of the row that runs, or None outside of [`row_checkpoints`]."""
    return _current.get()


class TimedCheckpoints(TrainerCallback):
    """Saves a checkpoint every `SECONDS_BETWEEN_CHECKPOINTS`, and at the end of a training that saved any.

    Writes a line of progress to standard error once a minute.

    Attributes:
        checkpoint: the checkpoint to resume from, or None.
        seconds: duration of the training up to it.
    """

    def __init__(self, folder: Path, row_name: str):
        self._file, self._row_name = folder / _LAST, row_name
        self.checkpoint: str | None = None
        self.seconds = 0.0
        if self._file.exists():
            last = json.loads(self._file.read_text(encoding="utf-8"))
            self.checkpoint, self.seconds = str(folder / last["checkpoint"]), last["seconds"]
        self._start = self._saved = self._written = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.monotonic()
        is_due = now - self._saved >= SECONDS_BETWEEN_CHECKPOINTS
        control.should_save |= is_due or (state.global_step >= state.max_steps and self._file.exists())
        if now - self._written >= _SECONDS_BETWEEN_LINES:
            self._written = now
            sys.stderr.write(f"  {self._row_name}: step {state.global_step:,} of {state.max_steps:,}\n")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved = time.monotonic()
        last = {"checkpoint": f"checkpoint-{state.global_step}", "seconds": self.seconds + self._saved - self._start}
        write_text(json.dumps(last), self._file)
