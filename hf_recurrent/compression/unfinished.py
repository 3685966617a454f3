"""An output file while it is written, with everything needed to continue after an interruption."""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hf_recurrent.checkpoints.files import (
    list_checkpoints,
    load_tree,
    new_staging_directory,
    publish_directory,
    reading_checkpoint,
    remove_staging,
    save_tree,
)
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.compression.coding import Progress
from hf_recurrent.compression.predictors import Predictor

_NAME = "progress"


def partial_directory(output: Path) -> Path:
    """The directory of an unfinished output."""
    return output.with_name(output.name + ".partial")


@contextmanager
def unfinished_file(output: Path, identity: dict[str, Any]) -> Iterator["UnfinishedFile"]:
    """A file in the directory OUTPUT.partial, locked against other processes and renamed to `output` when complete.

    Args:
        output: the file; it is complete if the block ends without an exception.
        identity: JSON values; only work with the same values is continued.
    """
    directory = partial_directory(output)
    with output_lock(directory):
        path = directory / "content"
        path.touch()
        with path.open("r+b") as file:
            yield UnfinishedFile(file, directory, identity)
            file.flush()
            os.fsync(file.fileno())
            os.replace(path, output)
        for saved in list_checkpoints(directory):
            shutil.rmtree(saved)
    shutil.rmtree(directory, ignore_errors=True)


class UnfinishedFile:
    """The open `file`, and the predictor saved after each of its blocks; see [`unfinished_file`]."""

    def __init__(self, file: IO[bytes], directory: Path, identity: dict[str, Any]):
        self.file, self._directory, self._identity = file, directory, identity

    def load(self, predictor: Predictor) -> dict[str, int]:
        """Restore the predictor; returns the `step`, the number of bytes `done` and the `position` in the archive.

        Raises:
            ValueError: the directory belongs to something else, or is damaged.
        """
        remove_staging(self._directory)
        saved = list_checkpoints(self._directory)
        if not saved:
            self.file.truncate(0)  # a block that was written just before the interruption
            return {"step": 0, "done": 0, "position": 0}
        with reading_checkpoint(saved[-1]):
            values = load_tree(saved[-1], _NAME)
            if values["identity"] != self._identity:
                raise ValueError(
                    f"{str(self._directory)!r} belongs to another file, model or setting; delete it to begin anew."
                )
            predictor.load_state_dict(values["predictor"])
        return values

    def save_blocks(
        self, blocks: Iterable[tuple[int, int]], predictor: Predictor, archive: IO[bytes], progress: Progress
    ) -> None:
        """Save everything needed to continue after each block, given by its next step and the number of bytes done."""
        for step, done in blocks:
            self.file.flush()
            os.fsync(self.file.fileno())
            before = list_checkpoints(self._directory)
            directory = self._directory / f"checkpoint-{step}"
            staging = new_staging_directory(directory)
            values = {"step": step, "done": done, "position": archive.tell()}
            save_tree({"identity": self._identity, "predictor": predictor.state_dict(), **values}, staging, _NAME)
            publish_directory(staging, directory)
            for path in before:
                shutil.rmtree(path)
            progress(done)
