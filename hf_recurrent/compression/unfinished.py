"""An output file while it is written, with everything needed to continue after an interruption."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hf_recurrent.checkpoints.files import (
    load_tree,
    new_staging_directory,
    publish_directory,
    reading_checkpoint,
    remove_staging,
    save_tree,
)
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.compression.predictors import Predictor

_CONTENT = "content"
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

    Raises:
        ValueError: another process writes it.
    """
    directory = partial_directory(output)
    with output_lock(directory):
        path = directory / _CONTENT
        path.touch()
        with path.open("r+b") as file:
            unfinished = UnfinishedFile(file, directory, identity)
            yield unfinished
            unfinished.sync()
            os.replace(path, output)
        for saved in unfinished.saved():
            shutil.rmtree(saved)
    shutil.rmtree(directory, ignore_errors=True)


class UnfinishedFile:
    """The open `file`, and the predictor saved after each of its blocks; see [`unfinished_file`]."""

    def __init__(self, file: IO[bytes], directory: Path, identity: dict[str, Any]):
        self.file, self._directory, self._identity = file, directory, identity

    def load(self, predictor: Predictor) -> dict[str, Any] | None:
        """Restore the predictor and return the last values of [`save`]; None if nothing was saved.

        Raises:
            ValueError: the directory belongs to something else, or is damaged.
        """
        remove_staging(self._directory)
        saved = self.saved()
        if not saved:
            return None
        with reading_checkpoint(saved[-1]):
            values = load_tree(saved[-1], _NAME)
            if values["identity"] != self._identity:
                raise ValueError(
                    f"{str(self._directory)!r} belongs to another file, model or setting; delete it to begin anew."
                )
            predictor.load_state_dict(values["predictor"])
        return values

    def save(self, predictor: Predictor, step: int, **values: Any) -> None:
        """Save everything needed to continue at `step`, after the bytes written so far."""
        self.sync()
        before = self.saved()
        directory = self._directory / f"{_NAME}-{step:015}"
        staging = new_staging_directory(directory)
        tree = {"identity": self._identity, "predictor": predictor.state_dict(), "step": step, **values}
        save_tree(tree, staging, _NAME)
        publish_directory(staging, directory)
        for path in before:
            shutil.rmtree(path)

    def saved(self) -> list[Path]:
        """Directories written by [`save`], the last of them complete."""
        return sorted(self._directory.glob(f"{_NAME}-*"))

    def sync(self) -> None:
        """Write the file to the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
