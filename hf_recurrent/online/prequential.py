"""Prequential bits per byte: every byte is predicted before the model learns from it, so the whole stream is a test.

As for held-out episodes, the cost of the end byte is included, so that the two numbers can be compared.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_recurrent.checkpoints.atomic_files import atomic_file
from hf_recurrent.online.line_file import LineFile
from hf_recurrent.plotting import require_pyplot

_MOST_POINTS = 4000  # of a plot
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True)
class PrequentialRecord:
    """The progress of a learner.

    Args:
        bytes_read: all bytes taken from the stream, end bytes of episodes included.
        updates: optimizer steps.
        bits_per_byte: over everything predicted so far; None before the first prediction.
        windowed_bits_per_byte: over the last bytes of the learner's window.
        bytes_per_second: since the previous record.
        held_out_bits_per_byte: of the current model on held-out episodes, if measured.
    """

    bytes_read: int
    updates: int
    bits_per_byte: float | None = None
    windowed_bits_per_byte: float | None = None
    bytes_per_second: float | None = None
    held_out_bits_per_byte: float | None = None


class PrequentialMeter:
    """Running and windowed bits per byte, over the last `window` bytes, in constant memory."""

    def __init__(self, window: int):
        self._recent = np.zeros(window)
        self._count, self._nats = 0, 0.0

    def add(self, nats: np.ndarray) -> None:
        """Add the nats of some bytes, (T,), in the order of the stream."""
        for value in nats.tolist():  # one by one, so that the sum does not depend on the block size
            self._recent[self._count % len(self._recent)] = value
            self._nats += value
            self._count += 1

    @property
    def bits_per_byte(self) -> float | None:
        return self._nats / math.log(2) / self._count if self._count else None

    @property
    def windowed_bits_per_byte(self) -> float | None:
        """Over the window, or over all bytes while these are fewer."""
        filled = min(self._count, len(self._recent))
        return float(self._recent[:filled].mean()) / math.log(2) if filled else None

    def state_dict(self) -> dict[str, Any]:
        return {"recent": torch.from_numpy(self._recent), "count": self._count, "nats": self._nats}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent, self._count, self._nats = state["recent"].numpy().copy(), state["count"], state["nats"]


class RecordFile(LineFile):
    """JSON lines to append records to; a resumed run continues at its checkpoint.

    Args:
        path: the file, not a link; records after `bytes_read`, and an incomplete line, are removed from it.
        bytes_read: position in the stream at which the run starts; -1 removes all records.
    """

    def __init__(self, path: str | os.PathLike, bytes_read: int = 0):
        super().__init__(path, getattr(os, "O_NOFOLLOW", 0))
        try:
            self.truncate(check_records(path, bytes_read))
        except BaseException:
            self.close()
            raise

    def write(self, record: PrequentialRecord) -> None:
        """Append a record without its fields that are None; after an OSError, the file is as before."""
        values = {name: value for name, value in asdict(record).items() if value is not None}
        self.append(json.dumps(values).encode() + b"\n")

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *error) -> None:
        self.close()


def read_records(path: str | os.PathLike) -> Iterator[PrequentialRecord]:
    """The records of a file written by [`RecordFile`], without an incomplete last line.

    Raises:
        ValueError: a line is not a record.
    """
    return (record for record, _ in _records(path))


def check_records(path: str | os.PathLike, bytes_read: int) -> int:
    """The size of the file up to the last record at or before `bytes_read`."""
    end = 0
    for record, next_end in _records(path) if bytes_read >= 0 else ():
        if record.bytes_read > bytes_read:
            break
        end = next_end
    return end


def _records(path: str | os.PathLike) -> Iterator[tuple[PrequentialRecord, int]]:
    """Each record with the position after its line."""
    number = end = 0
    with open(path, "rb") as file:
        while line := file.readline(_LONGEST_LINE):
            number, end = number + 1, end + len(line)
            if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                return  # written by a process that was killed
            try:
                yield _parse(line), end
            except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
                reason = str(error)[:100].rstrip(".")
                raise ValueError(
                    f"`{os.fspath(path)}`, line {number}, is not a record of a stream: {reason}; correct or remove "
                    "that line."
                ) from error


def _parse(line: bytes) -> PrequentialRecord:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"it is a JSON {type(values).__name__}")
    record = PrequentialRecord(**values)
    for name, value in asdict(record).items():
        counts = name in ("bytes_read", "updates")
        allowed = type(value) is int and value >= 0 if counts else value is None or type(value) in (int, float)
        if not allowed or not math.isfinite(value or 0):
            raise ValueError(f"its `{name}` is {value!r:.40}")
    return record


def plot_records(records: Iterable[PrequentialRecord], path: str | os.PathLike) -> None:
    """Plot windowed, running and held-out bits per byte over the bytes read; needs matplotlib.

    Args:
        records: of one stream, in order.
        path: the image file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = require_pyplot()
    records = list(records)
    held_out = [record for record in records if record.held_out_bits_per_byte is not None]
    records = records[:: max(len(records) // _MOST_POINTS, 1)]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    read = [record.bytes_read for record in records]
    windowed = np.array([record.windowed_bits_per_byte for record in records], dtype=float)  # None becomes NaN
    running = np.array([record.bits_per_byte for record in records], dtype=float)
    axes.plot(read, windowed, label="prequential, window")
    axes.plot(read, running, "--", label="prequential, running")
    if held_out:
        measured = [(record.bytes_read, record.held_out_bits_per_byte) for record in held_out]
        axes.plot(*zip(*measured, strict=True), "o-", label="held-out episodes")
    axes.set_xlabel("bytes read")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=150, format=Path(path).suffix.lstrip(".") or "png")
    pyplot.close(figure)
