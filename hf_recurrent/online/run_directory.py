"""The directory of a run of `hf-recurrent learn`: the checkpoint to resume, and what a new run may replace."""

import os
import shutil
from pathlib import Path

from hf_recurrent.checkpoints.files import STAGING_PREFIX, list_checkpoints
from hf_recurrent.checkpoints.output_lock import LOCK_FILE
from hf_recurrent.online.saved_learner import check_files

RECORDS_FILE, STATE_FILE = "records.jsonl", "state.safetensors"


def find_checkpoint(directory: Path, resume: bool, restart: bool) -> str | None:
    """The last checkpoint of the run in a directory, damaged or not; None to begin a run.

    Raises:
        ValueError: the directory holds something else, a run without `resume` or `restart`, or a model without its
            checkpoint.
    """
    name = f"`--output_dir` is {str(directory)!r}"
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{name}; it must be a directory.")
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    if all(name == LOCK_FILE or name.startswith(STAGING_PREFIX) for name in names):
        return None
    if not (resume or restart):
        raise ValueError(f"{name}; it must be empty. To continue the run in it, add --resume.")
    checkpoints = list_checkpoints(directory)
    foreign = [path for path in checkpoints if not _is_of_a_learner(path)]
    if len(foreign) == len(checkpoints) and not (directory / RECORDS_FILE).is_file():
        flag = "--resume" if resume else "--restart"
        raise ValueError(f"{name}; with {flag}, it must have a run of this command.")
    if restart:
        if foreign:
            raise ValueError(f"{name}, but {foreign[0]} is not a checkpoint of this command; move it elsewhere first.")
        return None
    if not checkpoints and (directory / "config.json").exists():
        raise ValueError(f"{name}; it has a model, but no checkpoint to resume; to begin anew, use --restart.")
    return checkpoints[-1] if checkpoints else None


def check_checkpoint(directory: Path, checkpoint: str) -> None:
    """Raise a ValueError that names the damaged file of a checkpoint, and a way to continue."""
    try:
        check_files(checkpoint)
    except ValueError as error:
        damaged = [checkpoint]
        way_on = "to begin anew, use --restart instead of --resume"
        for older in reversed(list_checkpoints(directory)[:-1]):
            if _is_whole(older):
                way_on = f"to resume from {older}, remove {' and '.join(damaged)}"
                break
            damaged.append(older)
        raise ValueError(f"{str(error).rstrip('.')}; {way_on}.") from error


def remove_run(directory: Path) -> None:
    """Remove the checkpoints of the run in a directory; its model stays until another is saved."""
    while checkpoints := list_checkpoints(directory):  # again for those with a temporary name too
        for path in checkpoints:
            shutil.rmtree(path)


def _is_of_a_learner(checkpoint: str) -> bool:
    return any(os.path.lexists(os.path.join(checkpoint, f"learner.{kind}")) for kind in ("json", "safetensors"))


def _is_whole(checkpoint: str) -> bool:
    try:
        check_files(checkpoint)
    except ValueError:
        return False
    return True
