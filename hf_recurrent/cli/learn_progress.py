"""Progress of `hf-recurrent learn`."""

import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

if TYPE_CHECKING:
    from hf_recurrent.online.prequential import PrequentialRecord

# Seconds between two lines without a terminal.
_LINE_SECONDS = 10.0


def describe(record: "PrequentialRecord", window: int) -> str:
    """Bits per byte of a record in words."""
    if record.bits_per_byte is None:
        return "no predictions yet"
    return (
        f"{record.bits_per_byte:.3f} bits per byte, {record.windowed_bits_per_byte:.3f} over the last "
        f"{min(window, record.bytes_read):,}"
    )


class Progress:
    """One line that is updated in a terminal; a new line every few seconds elsewhere."""

    def __init__(self, window: int, quiet: bool):
        self.window, self.terminal, self.quiet = window, sys.stderr.isatty(), quiet
        self.shown = time.monotonic()
        self.bar = tqdm(disable=quiet or not self.terminal, bar_format="{desc}", dynamic_ncols=True, file=sys.stderr)

    def show(self, record: "PrequentialRecord") -> None:
        """Show a record."""
        from hf_recurrent.data.episode_source import with_unit

        rate = with_unit(record.bytes_per_second or 0, "B/s")
        text = f"{record.bytes_read:,} bytes read: {describe(record, self.window)}, {rate}"
        self.bar.set_description_str(text)
        if not self.terminal and not self.quiet and time.monotonic() - self.shown >= _LINE_SECONDS:
            self.shown = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()
