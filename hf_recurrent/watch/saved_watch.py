"""Checkpoints of a watch: the learners of all logs, their positions in the logs, and the size of the output."""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_recurrent.checkpoints.files import (
    list_checkpoints,
    load_tree,
    new_staging_directory,
    publish_directory,
    reading_checkpoint,
    save_tree,
    writing_checkpoint,
)
from hf_recurrent.checkpoints.manifest import check_manifest, write_manifest
from hf_recurrent.online.learner import OnlineLearner

_FILES = "watch"
_FORMAT = 1


@dataclass(frozen=True)
class SavedLog:
    """One log of a checkpoint.

    Args:
        name: of its source.
        folder: of its learner, in the checkpoint.
        watcher: of `LogWatcher.state`.
        position: of `LogSource.position`; None for a source that cannot be continued.
        counts: of lines, bytes and the like.
    """

    name: str
    folder: str
    watcher: Mapping[str, Any]
    position: Mapping[str, Any] | None
    counts: Mapping[str, float]


def folder_names(names: list[str]) -> list[str]:
    """A folder for each log: the last part of its name, with a number if another log has the same."""
    folders: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w.-]", "_", os.path.basename(name)).lstrip(".-") or "log"
        folder, number = plain, 2
        while folder in folders:
            folder, number = f"{plain}-{number}", number + 1
        folders.append(folder)
    return folders


def save_watch(
    directory: Path,
    number: int,
    learners: Mapping[str, OnlineLearner],
    logs: list[SavedLog],
    output: Mapping[str, Any] | None,
) -> None:
    """Write `checkpoint-NUMBER`, atomically, and remove the older ones.

    Args:
        directory: of the watch.
        number: higher than the number of the checkpoint before.
        learners: folder → learner.
        logs: with the same folders.
        output: `LineLog.mark` at this moment; None without a line log.

    Raises:
        OSError: the disk is full, for example; the older checkpoint is unchanged.
    """
    final = directory / f"checkpoint-{number}"
    with writing_checkpoint(final):
        staging = new_staging_directory(final)
        for folder, learner in learners.items():
            learner.save(staging / folder)
        save_tree({"format": _FORMAT, "logs": [vars(log) for log in logs], "output": output}, staging, _FILES)
        write_manifest(staging)
        publish_directory(staging, final)
    for old in list_checkpoints(directory):
        if Path(old).name != final.name:
            shutil.rmtree(old, ignore_errors=True)


def read_watch(checkpoint: str | os.PathLike) -> tuple[dict[str, SavedLog], dict[str, Any] | None]:
    """Name → log of a checkpoint, and the mark of the JSON lines.

    Raises:
        ValueError: a file is missing or damaged.
    """
    check_manifest(checkpoint)
    tree = load_tree(checkpoint, _FILES)
    with reading_checkpoint(Path(checkpoint) / f"{_FILES}.json"):
        if tree["format"] != _FORMAT:
            raise ValueError(f"The checkpoint {os.fspath(checkpoint)!r} has another format than {_FORMAT}.")
        logs = {}
        for entry in tree["logs"]:
            folder = folder_names([entry["folder"]])[0]  # no path outside the checkpoint
            logs[entry["name"]] = SavedLog(**entry | {"folder": folder})
        return logs, tree["output"]


def is_watch(checkpoint: str | os.PathLike) -> bool:
    """True if a directory has the files of [`save_watch`], damaged or not."""
    return os.path.isfile(Path(checkpoint) / f"{_FILES}.json")
