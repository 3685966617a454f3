"""The source of a run of `hf-recurrent learn`, continued where the learner has stopped reading it."""

import os
from pathlib import Path
from typing import Any

from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.source_identity import ChangedSourceError, is_same_file
from hf_recurrent.online.sources import STANDARD_INPUT, Source, open_source

# Keys of the learner's metadata: the name of the source, the bytes that the learner read before it, and its identity.
_NAME, _BEFORE, _IDENTITY = "source", "bytes_before", "file"


def continue_source(
    learner: OnlineLearner, source_name: str, *, follow: bool, timeout: float | None
) -> tuple[Source, int]:
    """Open a source, and return it with the bytes of it that the learner has read.

    A file continues where it was read to, also under a new name. Any other source is read from its beginning.

    Raises:
        OSError, ValueError: the source cannot be opened, or is not the file that was read before.
    """
    name, start, saved = source_name, 0, learner.metadata
    options = {"follow": follow, "timeout": timeout}
    source = None
    if name != STANDARD_INPUT and Path(name).is_file():
        name = os.path.abspath(name)
        has_its_name = saved.get(_NAME) == name
        if has_its_name or is_same_file(os.stat(name), saved.get(_IDENTITY) or {}):
            start = learner.bytes_read - saved[_BEFORE]
            try:
                source = open_source(source_name, start=start, identity=saved.get(_IDENTITY), **options)
            except ChangedSourceError as error:
                if has_its_name:
                    raise ValueError(f"{str(error).rstrip('.')}; {_ways_on(source_name)}.") from error
                start = 0  # another file with the number that the old one had
    source = source or open_source(source_name, **options)
    learner.training_record.name_source({STANDARD_INPUT: "standard input"}.get(name, name))
    learner.metadata = {**saved, _NAME: name, _BEFORE: learner.bytes_read - start}
    return source, start


def _ways_on(name: str) -> str:
    return (
        "to finish a rotated file first, resume with its new name; to continue with the same learner at the first "
        f"byte of this file, use `--source - --resume < {name}`; to begin anew, use --restart instead of --resume"
    )


def remember_source(learner: OnlineLearner, source: Source) -> None:
    """Store in the learner how the source can be recognized, before the learner is saved."""
    learner.metadata[_IDENTITY] = source.identity(learner.bytes_read - learner.metadata[_BEFORE])


def check_metadata(values: dict[str, Any], bytes_read: int) -> None:
    """Raise a ValueError unless the values describe a source, or none."""
    name, before, identity = (values.get(key) for key in (_NAME, _BEFORE, _IDENTITY))
    is_source = isinstance(name, str) and type(before) is int and 0 <= before <= bytes_read
    kinds = {"device": int, "inode": int, "digest": str}
    is_identity = isinstance(identity, dict) and {key: type(value) for key, value in identity.items()} == kinds
    if not (is_source or name is before is None) or not (is_identity or identity is None):
        found = {"source": name, "bytes_before": before, "file": identity}
        raise ValueError(f"its metadata has {found!r:.100}, which is not a source.")
