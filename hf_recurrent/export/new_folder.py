"""A folder that appears when all of its files are written."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_recurrent.checkpoints.atomic_files import naming_file
from hf_recurrent.checkpoints.files import new_staging_directory


def check_new(folder: Path) -> None:
    """Raise a FileExistsError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"`folder` is {os.fspath(folder)!r}, which exists; it must be a new or empty folder.")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context with a staging folder, which becomes `folder` at its end; after an error, nothing is left."""
    staging = new_staging_directory(folder)
    try:
        with naming_file(folder):
            yield staging
        if folder.exists():
            folder.rmdir()
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
