"""The benchmark of loading runs at small sizes and prints its table."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_data.py"


@pytest.fixture(autouse=True)
def scripts_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)


def test_it_prints_a_table(tmp_path, monkeypatch, capsys):
    text = tmp_path / "a.txt"
    text.write_text("some text of a book " * 1000)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    arguments = ["--source", str(text), "--shapes", "64x8", "8x1024", "--seconds", "0.05"]
    monkeypatch.setattr(sys, "argv", ["benchmark_data.py", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    *_, header, first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "share" and first.split()[:3] == ["multi_stream", "64", "8"]
    for line in (first, second, third, fourth):
        assert float(line.split()[-1].rstrip("%")) >= 0


def test_a_shape_that_is_invalid(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark_data.py", "--shapes", "8,8"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "not of the form" in capsys.readouterr().err
