"""Files of a source, and the facts that change with their content."""

from pathlib import Path


def file_stamp(path: Path) -> list:
    """Name, size and modification time of a file, as JSON."""
    status = path.stat()
    return [str(path.absolute()), status.st_size, status.st_mtime_ns]


def files_below(directory: Path) -> list[Path]:
    """All files, sorted, without those whose name or directory begins with a dot."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(p.startswith(".") for p in path.relative_to(directory).parts))
