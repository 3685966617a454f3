"""Transcripts as HTML and SVG. The colours are classes of the page's style sheet; all text is escaped, also for the
templates of Gradio's HTML component."""

import html
import math
from bisect import bisect_right

import numpy as np

from hf_recurrent.server.page.transcript import SurpriseCurve, Transcript

# Upper ends of the classes of surprise, in bits; the last class has none.
LEVELS = (0.5, 1, 2, 3, 4, 6, 8, 12)
_LEAST_TOP = 4  # bits per byte at the top of the curve


def draw_text(transcript: Transcript) -> str:
    """A span for every character, coloured by the bits of its bytes. More bytes only add spans at the end."""
    text = transcript.data.decode("utf-8", "surrogateescape")
    parts = []
    if transcript.begins_with is not None:
        parts.append(f'<span class="earlier">continues {escape(transcript.begins_with)} </span>')
    if not transcript.is_whole:
        parts.append('<span class="earlier">…</span>')
    begin = 0
    for character in text:
        end = begin + len(character.encode("utf-8", "surrogateescape"))
        parts.append(_span(transcript, begin, end, character))
        begin = end
    return "".join(parts)


def draw_legend() -> str:
    """The colours and their bits."""
    names = [f"&lt; {LEVELS[0]:g}", *(f"{level:g}" for level in LEVELS)]
    items = "".join(f'<li class="s{place}">{name}</li>' for place, name in enumerate(names))
    return f'<ul id="legend" aria-label="Colours, in bits"><li>bits</li>{items}</ul>'


def draw_measures(transcript: Transcript, state_bytes: int) -> str:
    """Length, bits per byte and size of the state."""
    curve = transcript.curve
    bits = "?" if curve.bits_per_byte is None else f"{curve.bits_per_byte:.2f}"
    measures = (
        ("bits", bits, "bits per byte"),
        ("length", f"{curve.length:,}", "bytes so far"),
        ("state", size(state_bytes), "of memory, always"),
    )
    items = (f'<li><strong id="{key}">{value}</strong> {unit}</li>' for key, value, unit in measures)
    return f'<ul class="measures">{"".join(items)}</ul>'


def size(count: int) -> str:
    """A number of bytes."""
    return f"{count:,} bytes" if count < 1024 else f"{count / 1024:.3g} KiB"


def draw_curve(curve: SurpriseCurve) -> str:
    """Bits per byte along the text; where the model learned, in another colour."""
    places = np.flatnonzero(curve.counts)
    means = curve.sums[places] / curve.counts[places]
    top = max(_LEAST_TOP, math.ceil(means.max(initial=0)))
    # Of a width of 100 and a height of 100.
    points = [
        (100 * min((place + 0.5) * curve.width, curve.length) / curve.length, 100 * (1 - mean / top))
        for place, mean in zip(places.tolist(), means.tolist(), strict=True)
    ]
    lines = [f'<polyline points="{_points(points)}"/>']
    for run in _runs(curve.learned[places] > 0):
        lines.append(f'<polyline class="learned" points="{_points(points[max(run.start - 1, 0) : run.stop])}"/>')
    note = f"bits per byte along the text, 0 to {top}"
    if curve.learned.any():
        note += '; <span class="learned">the model learned here</span>'
    return (
        '<figure><svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Bits per byte along the text"><line x1="0" y1="50" x2="100" y2="50"/>{"".join(lines)}</svg>'
        f"<figcaption>{note}</figcaption></figure>"
    )


def draw_note(message: str, is_error: bool = False) -> str:
    """A sentence about the last event."""
    return f'<p role="status" class="{"error" if is_error else ""}">{escape(message)}</p>'


def _span(transcript: Transcript, begin: int, end: int, character: str) -> str:
    bits = transcript.bits[begin:end].tolist()
    classes = ["none" if math.isnan(value) else f"s{bisect_right(LEVELS, value)}" for value in bits]
    kinds, style = [], ""
    if len(set(classes)) == 1:
        kinds.append(classes[0])
    else:  # a stripe for every byte
        width = 100 / len(bits)
        colours = ("transparent" if name == "none" else f"var(--{name})" for name in classes)
        stops = (f"{colour} {place * width:.0f}% {(place + 1) * width:.0f}%" for place, colour in enumerate(colours))
        style = f' style="background-image:linear-gradient(90deg,{",".join(stops)})"'
    shown = character
    if character == "\n":
        kinds.append("newline")
    elif character == "\t":
        kinds.append("tab")
    elif not character.isprintable():  # also a byte that is not UTF-8
        kinds.append("label")
        shown = transcript.data[begin:end].hex().upper()
    if transcript.generated[begin]:
        kinds.append("generated")
    told = ", ".join("not predicted" if math.isnan(value) else f"{value:.2f}" for value in bits)
    unit = "" if math.isnan(bits[-1]) else " bits"
    return f'<span class="{" ".join(kinds)}"{style} title="{told}{unit}">{escape(shown)}</span>'


def escape(text: str) -> str:
    """Text as HTML that no template changes."""
    return html.escape(text).replace("{", "&#123;").replace("}", "&#125;").replace("$", "&#36;").replace("`", "&#96;")


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in points)


def _runs(flags: np.ndarray) -> list[range]:
    """The runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(np.int8), [0]])))
    return [range(*pair) for pair in edges.reshape(-1, 2).tolist()]
