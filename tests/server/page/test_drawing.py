"""Transcripts, their curves, and their drawings, which escape hostile text."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from hf_recurrent.server.page import drawing
from hf_recurrent.server.page.transcript import SurpriseCurve, Transcript

ROOT = Path(__file__).parents[3]
HOSTILE = "<script>alert(1)</script> {{value}} ${1} `x` \" '"


def test_a_curve_keeps_sums_in_few_bins():
    drawn = np.random.default_rng(0)
    curve, bits = SurpriseCurve(), np.array([])
    for size in (1, 30, 5, 20_000, 7, 100_001):
        more = drawn.exponential(2, size)
        more[0] = math.nan
        curve, bits = curve.add(more), np.concatenate([bits, more])
    assert curve.length == len(bits) and len(curve.sums) <= 256 and curve.counts.sum() == len(bits) - 6
    assert curve.bits_per_byte == pytest.approx(np.nanmean(bits))
    first = bits[: curve.width]
    assert curve.sums[0] == pytest.approx(np.nansum(first)) and curve.counts[0] == np.isfinite(first).sum()
    assert SurpriseCurve().bits_per_byte is None and not curve.learned.any()


def test_a_transcript_keeps_the_last_bytes_and_never_changes():
    transcript = first = Transcript().add(b"abc", [math.nan, 1, 2])
    for _ in range(40):
        transcript = transcript.add("日本".encode() * 50, [3.0] * 300, is_generated=True)
        assert len(transcript.data) == len(transcript.bits) == len(transcript.generated) <= 4096
        transcript.data.decode()  # not cut within a character
    assert first.data == b"abc" and first.is_whole and not transcript.is_whole
    assert transcript.curve.length == 12_003


def test_text_is_escaped_and_bytes_are_coloured():
    data = HOSTILE.encode() + b"\xff\x00\n\t" + "é".encode()
    bits = [math.nan, *[0.1] * (len(data) - 3), 5, 13]
    shown = drawing.draw_text(Transcript(begins_with=HOSTILE).add(data, bits))
    assert not set("{}$`") & set(shown) and "<script" not in shown
    spans = re.findall(r'<span class="([^"]*)"([^>]*)>([^<]*)</span>', shown)
    assert spans[0][0] == "earlier" and spans[1][:1] == ("none",)
    assert [text for _, _, text in spans[-5:]] == ["FF", "00", "\n", "\t", "é"]
    assert spans[-2][0] == "s0 tab" and 'title="5.00, 13.00 bits"' in spans[-1][1]
    assert "var(--s5) 0% 50%,var(--s8) 50% 100%" in spans[-1][1]
    assert HOSTILE not in drawing.draw_note(HOSTILE)


def test_more_bytes_only_add_to_the_drawing():
    """Gradio then sends the new end only."""
    transcript, data = Transcript(), b"word and " * 100
    before = ""
    for begin in range(0, 900, 50):
        transcript = transcript.add(data[begin : begin + 50], [2.0] * 50)
        shown = drawing.draw_text(transcript)
        assert shown.startswith(before)
        before = shown


def test_the_curve_shows_where_the_model_learned():
    curve = SurpriseCurve().add([8.0] * 64).add([2.0] * 64, is_learned=True)
    whole, learned = re.findall(r'points="([^"]*)"', drawing.draw_curve(curve))
    assert [pair.split(",")[1] for pair in whole.split()] == ["0.00", "0.00", "75.00", "75.00"]
    assert len(learned.split()) == 3  # with the last point before
    assert "polyline" in drawing.draw_curve(SurpriseCurve())


def test_colours_are_those_of_the_example():
    example, own = (ROOT / "examples/browser/style.css").read_text(), drawing.__file__
    style = Path(own).with_name("page.css").read_text()
    ramp = re.compile(r"--(?:on-)?s\d: [^;]+;")
    assert ramp.findall(style) == ramp.findall(example)
    levels = re.search(r"LEVELS = (\[.*?\])", (ROOT / "examples/browser/text_view.js").read_text())[1]
    assert tuple(json.loads(levels)) == drawing.LEVELS
