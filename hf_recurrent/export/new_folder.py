"""A folder that appears when all of its files are written."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hf_recurrent.checkpoints.atomic_files import naming_file
from hf_recurrent.checkpoints.files import new_staging_directory
from hf_recurrent.checkpoints.manifest import write_manifest


def check_new(folder: Path) -> None:
    """Raise a FileExistsError if the folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"`folder` is {os.fspath(folder)!r}, which exists; it must be a new or empty folder.")


@contextmanager
def new_folder(folder: Path, kind: str, card: str, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Path]:
    """Context with a staging folder, which becomes `folder` at its end; after an error, nothing is left.

    What was written gets the tokenizer, if there is one, checksums in a manifest of this kind, and a card.
    """
    staging = new_staging_directory(folder)
    try:
        with naming_file(folder):
            yield staging
            if tokenizer is not None:
                tokenizer.save_pretrained(staging)
            write_manifest(staging, kind=kind)
            # After the manifest: a card may be edited.
            (staging / "README.md").write_text(card, encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
