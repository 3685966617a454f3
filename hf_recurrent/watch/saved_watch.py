"""Checkpoints of a watch: the learners of all logs, their positions in the logs, and the size of the output."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_recurrent.checkpoints.files import (
    list_checkpoints,
    load_tree,
    new_staging_directory,
    publish_directory,
    reading_checkpoint,
    remove_staging,
    save_tree,
    writing_checkpoint,
)
from hf_recurrent.checkpoints.manifest import check_manifest, write_manifest

if TYPE_CHECKING:
    from hf_recurrent.watch.watched_log import WatchedLog

_FILES = "watch"
_FORMAT = 1


def folder_names(names: Sequence[str]) -> list[str]:
    """A folder for each log: the last part of its name, with a number if another log has the same."""
    folders: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.-]", "_", os.path.basename(name)).lstrip(".-") or "log"
        folder, number = plain, 2
        while folder in folders:
            folder, number = f"{plain}-{number}", number + 1
        folders.append(folder)
    return folders


def save_watch(final: Path, logs: Sequence["WatchedLog"], output: Mapping[str, Any] | None) -> None:
    """Write the checkpoint `final`, atomically, and remove the older ones; `output` is the mark of the line log.

    Raises:
        OSError: the disk is full, for example; the older checkpoint is unchanged.
    """
    with writing_checkpoint(final):
        staging = new_staging_directory(final)
        for log in logs:
            log.watcher.learner.save(staging / log.folder)
        save_tree({"format": _FORMAT, "logs": [log.state() for log in logs], "output": output}, staging, _FILES)
        write_manifest(staging)
        publish_directory(staging, final)
    for old in list_checkpoints(final.parent):
        if Path(old).name != final.name:
            shutil.rmtree(old, ignore_errors=True)


def read_watch(checkpoint: str | os.PathLike) -> tuple[dict[str, dict[str, Any]], dict[str, Any] | None]:
    """Name of a log → `WatchedLog.state`, and the mark of the JSON lines.

    Raises:
        ValueError: a file is missing or damaged.
    """
    check_manifest(checkpoint)
    tree = load_tree(checkpoint, _FILES)
    with reading_checkpoint(Path(checkpoint) / f"{_FILES}.json"):
        if tree["format"] != _FORMAT:
            raise ValueError(f"The checkpoint {os.fspath(checkpoint)!r} has another format than {_FORMAT}.")
        for log in tree["logs"]:
            log["folder"] = folder_names([log["folder"]])[0]  # no path outside the checkpoint
        return {log["name"]: log for log in tree["logs"]}, tree["output"]


def last_checkpoint(directory: Path, restart: bool) -> str | None:
    """The checkpoint to continue, or None; `restart` removes all of them.

    Raises:
        ValueError: the directory has checkpoints of another command.
    """
    remove_staging(directory)
    checkpoints = list_checkpoints(directory)
    if foreign := [path for path in checkpoints if not Path(path, f"{_FILES}.json").is_file()]:
        raise ValueError(f"`--output_dir` is {str(directory)!r}, where {foreign[0]} is of another command.")
    if restart:
        for path in checkpoints:
            shutil.rmtree(path)
        return None
    return checkpoints[-1] if checkpoints else None
