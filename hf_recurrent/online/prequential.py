"""Prequential bits per byte: every byte is predicted before it is learned from, so that all of a stream is a test.

A stream counts as held-out episodes do: a byte for every byte of an episode that something follows, the cost of the
end byte included, so that both numbers can stand side by side.
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

from hf_recurrent.plotting import require_pyplot

# As many points as a picture can show.
_PLOTTED = 4000


@dataclass(frozen=True)
class PrequentialRecord:
    """Where a learner stands.

    Args:
        bytes_read: all bytes taken from the stream, those that end episodes included.
        updates: steps of the optimizer.
        bits_per_byte: over everything predicted so far; None before the first prediction.
        windowed_bits_per_byte: over the last bytes, as many as the learner's window holds.
        bytes_per_second: since the record before, if there was one.
        held_out_bits_per_byte: of the model as it is now on held-out episodes, where somebody measured it.
    """

    bytes_read: int
    updates: int
    bits_per_byte: float | None
    windowed_bits_per_byte: float | None
    bytes_per_second: float | None = None
    held_out_bits_per_byte: float | None = None


class PrequentialMeter:
    """Running and windowed bits per byte in constant memory.

    Args:
        window: bytes of the window.
    """

    def __init__(self, window: int):
        self._recent = np.zeros(window)
        self._count, self._nats = 0, 0.0

    def add(self, nats: np.ndarray) -> None:
        """Score some bytes: nats of each, in the order of the stream."""
        places = (self._count + np.arange(len(nats)))[-len(self._recent) :] % len(self._recent)
        self._recent[places] = nats[-len(self._recent) :]
        for value in nats.tolist():  # one after another, so that blocks of any size give the same sum
            self._nats += value
        self._count += len(nats)

    @property
    def bits_per_byte(self) -> float | None:
        """Over everything; None before the first byte."""
        return self._nats / math.log(2) / self._count if self._count else None

    @property
    def windowed_bits_per_byte(self) -> float | None:
        """Over the window, or over everything while that is less."""
        filled = min(self._count, len(self._recent))
        return float(self._recent[:filled].mean()) / math.log(2) if filled else None

    def state_dict(self) -> dict[str, Any]:
        """Everything that the meter knows, for [`load_state_dict`]."""
        return {"recent": torch.from_numpy(self._recent), "count": self._count, "nats": self._nats}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._recent, self._count, self._nats = state["recent"].numpy().copy(), state["count"], state["nats"]


class RecordFile:
    """JSON lines that grow by a record at a time; a resumed run goes on where its checkpoint stands.

    Args:
        path: the file; records behind `bytes_read`, and a line that was cut off, are removed from it.
        bytes_read: what was read when the run starts.
    """

    def __init__(self, path: str | os.PathLike, bytes_read: int = 0):
        self._file = open(path, "a+b")  # noqa: SIM115 (closed by the context manager)
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n") or json.loads(line)["bytes_read"] > bytes_read:
                break
            end += len(line)
        self._file.truncate(end)

    def write(self, record: PrequentialRecord) -> None:
        """Append a record; None is left out."""
        values = {name: value for name, value in asdict(record).items() if value is not None}
        self._file.write(json.dumps(values).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> "RecordFile":
        return self

    def __exit__(self, *error) -> None:
        self._file.close()


def read_records(path: str | os.PathLike) -> Iterator[PrequentialRecord]:
    """The records of a file that [`RecordFile`] wrote.

    Raises:
        ValueError: a line is no record.
    """
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield PrequentialRecord(**{"bits_per_byte": None, "windowed_bits_per_byte": None, **json.loads(line)})
            except (ValueError, TypeError) as error:
                raise ValueError(f"`{os.fspath(path)}`, line {number}, is no record of a stream: {error}.") from error


def plot_records(
    records: Iterable[PrequentialRecord], path: str | os.PathLike, *, marks: Mapping[float, str] | None = None
) -> None:
    """Windowed and running bits per byte over the bytes read, beside held-out bits per byte; needs matplotlib.

    Args:
        records: of one stream, in order.
        path: the picture.
        marks: places of the stream to be marked, and what to write there.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = require_pyplot()
    records = list(records)
    held_out = [record for record in records if record.held_out_bits_per_byte is not None]
    records = records[:: max(len(records) // _PLOTTED, 1)]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    read = [record.bytes_read for record in records]
    for name, label, style in (
        ("windowed_bits_per_byte", "prequential, window", {}),
        ("bits_per_byte", "prequential, running", {"linestyle": "--"}),
    ):
        values = [getattr(record, name) for record in records]
        axes.plot(read, [math.nan if value is None else value for value in values], label=label, **style)
    if held_out:
        places = [record.bytes_read for record in held_out]
        axes.plot(places, [record.held_out_bits_per_byte for record in held_out], "o-", label="held-out episodes")
    mark_places(axes, marks or {})
    axes.set_xlabel("bytes read")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    partial = Path(path).with_name(f".{Path(path).name}")
    figure.savefig(partial, dpi=150, format=Path(path).suffix.lstrip(".") or "png")
    pyplot.close(figure)
    os.replace(partial, path)


def mark_places(axes: Any, marks: Mapping[float, str]) -> None:
    """Vertical lines with what is written beside them."""
    for place, text in marks.items():
        axes.axvline(place, color="grey", linewidth=0.8, linestyle=":")
        axes.text(place, 0.99, f" {text}", transform=axes.get_xaxis_transform(), va="top", fontsize="small")
