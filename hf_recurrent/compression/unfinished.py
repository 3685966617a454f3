"""A file that is being written, with all that is needed to continue after an interruption."""

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


class Unfinished:
    """The directory OUTPUT.partial.

    Args:
        output: the file that will be complete.
        identity: JSON values; only work with the same ones is continued.
    """

    def __init__(self, output: Path, identity: dict[str, Any]):
        self._output, self._identity = output, identity
        self.directory = partial_directory(output)

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The unfinished file, locked against other processes.

        Raises:
            ValueError: another process writes it.
        """
        with output_lock(self.directory):
            path = self.directory / _CONTENT
            path.touch()
            with path.open("r+b") as file:
                yield file

    def load(self, predictor: Predictor) -> dict[str, Any] | None:
        """Restore the predictor and return the last values of [`save`]; None if nothing was saved.

        Raises:
            ValueError: the directory belongs to something else, or is damaged.
        """
        remove_staging(self.directory)
        saved = self._saved()
        if not saved:
            return None
        with reading_checkpoint(saved[-1]):
            values = load_tree(saved[-1], _NAME)
            if values["identity"] != self._identity:
                raise ValueError(
                    f"{str(self.directory)!r} belongs to another file, model or setting; delete it to begin anew."
                )
            predictor.load_state_dict(values["predictor"])
        return values

    def save(self, file: IO[bytes], predictor: Predictor, step: int, **values: Any) -> None:
        """Save all that is needed to continue at `step`, after the bytes written so far."""
        _sync(file)
        before = self._saved()
        directory = self.directory / f"{_NAME}-{step:015}"
        staging = new_staging_directory(directory)
        tree = {"identity": self._identity, "predictor": predictor.state_dict(), "step": step, **values}
        save_tree(tree, staging, _NAME)
        publish_directory(staging, directory)
        for path in before:
            shutil.rmtree(path)

    def publish(self, file: IO[bytes]) -> None:
        """Give the complete file its name, and delete the rest."""
        _sync(file)
        os.replace(self.directory / _CONTENT, self._output)
        for path in self._saved():
            shutil.rmtree(path)

    def remove(self) -> None:
        """Delete the directory after `opened`, unless another process uses it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _saved(self) -> list[Path]:
        return sorted(self.directory.glob(f"{_NAME}-*"))


def partial_directory(output: Path) -> Path:
    """The directory of an unfinished output."""
    return output.with_name(output.name + ".partial")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
