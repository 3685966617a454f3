"""Progress of a run of `hf-recurrent learn` in a terminal or a log."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from hf_recurrent.data.quantities import with_unit

if TYPE_CHECKING:
    from hf_recurrent.online.prequential import PrequentialRecord

# Seconds between two lines without a terminal.
_LINE_SECONDS = 10.0


def describe(record: "PrequentialRecord", window: int) -> str:
    """Bits per byte of a record in words."""
    if record.bits_per_byte is None:
        return "no predictions yet"
    windowed = f"{record.windowed_bits_per_byte:.3f} over the last {min(window, record.bytes_read):,}"
    return f"{record.bits_per_byte:.3f} bits per byte, {windowed}"


def show_progress(
    records: Iterable["PrequentialRecord"], window: int, quiet: bool, size: int | None = None
) -> Iterator["PrequentialRecord"]:
    """The same records, shown in one line of a terminal, or every few seconds in a new line elsewhere.

    With the `size`, which is `bytes_read` at the end of the source, they show the time left.
    """
    terminal, shown = sys.stderr.isatty(), time.monotonic()
    with tqdm(disable=quiet or not terminal, bar_format="{desc}", dynamic_ncols=True, file=sys.stderr) as bar:
        for record in records:
            rate = with_unit(record.bytes_per_second or 0, "B/s")
            text = f"{with_unit(record.bytes_read, 'B')}: {describe(record, window)}, {rate}{_left(record, size)}"
            bar.set_description_str(text)
            if not terminal and not quiet and time.monotonic() - shown >= _LINE_SECONDS:
                shown = time.monotonic()
                print(text, file=sys.stderr, flush=True)
            yield record


def _left(record: "PrequentialRecord", size: int | None) -> str:
    if size is None or not record.bytes_per_second:
        return ""
    return f", {tqdm.format_interval(max(size - record.bytes_read, 0) / record.bytes_per_second)} left"
