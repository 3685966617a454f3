"""Files that an earlier version saved: archives of unfinished runs, without code and other unused things."""

import json
import zipfile
from pathlib import Path

SAVED_FOLDER = Path(__file__).with_name("saved")
_LEFT_OUT = ("README.md", "training_args.json", "train_results.json", "all_results.json")
_LEFT_OUT_KINDS = (".py", ".png")
# The moment that every file of an archive has, so that the same files are the same archive.
_MOMENT = (2020, 1, 1, 0, 0, 0)


def archive_of(name: str) -> Path:
    return SAVED_FOLDER / f"{name.replace(',', '').replace(' ', '_')}.zip"


def save(name: str, whole: Path, parts: tuple[str, ...]) -> None:
    """Archive the files and folders of a run that match these patterns."""
    SAVED_FOLDER.mkdir(exist_ok=True)
    matching = [path for part in parts for path in whole.glob(part)]
    found = {file for path in matching for file in (path, *path.rglob("*")) if file.is_file()}
    with zipfile.ZipFile(archive_of(name), "w") as archive:
        for path in sorted(found):
            if path.suffix in _LEFT_OUT_KINDS or path.name in _LEFT_OUT:
                continue
            content = _listing_what_is_there(path) if path.name == "manifest.json" else path.read_bytes()
            entry = zipfile.ZipInfo(path.relative_to(whole).as_posix(), _MOMENT)
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)


def extract(name: str, folder: Path) -> Path:
    """The run's folder as far as it was archived."""
    with zipfile.ZipFile(archive_of(name)) as archive:
        archive.extractall(folder)
    return folder


def _listing_what_is_there(manifest: Path) -> str:
    stored = json.loads(manifest.read_text())
    stored["files"] = [
        name for name in stored["files"]
        if Path(name).suffix not in _LEFT_OUT_KINDS and Path(name).name not in _LEFT_OUT
    ]  # fmt: skip
    return json.dumps(stored, indent=1) + "\n"
