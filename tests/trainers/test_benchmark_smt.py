"""Yardstick of an SMT step: the same products, so that the difference in time is the trainer's."""

import runpy
import sys
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_smt.py"
_SIZES = "--hidden_size 32 --layers 2 --readout_layers 2 --memory_tokens 3 --context_length 8 --future_length 4"
TINY = [*_SIZES.split(), "--sequences", "2"]


@pytest.fixture(autouse=True)
def scripts_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)


def test_the_yardstick_does_the_same_products():
    script = runpy.run_path(str(SCRIPT))
    losses = script["build_losses"](script["build_parser"]().parse_args(TINY))
    counts = {}
    for name in ("SMT", "yardstick"):
        with FlopCounterMode(display=False) as counter:
            losses[name]().backward()
        counts[name] = {str(kind): flops for kind, flops in counter.get_flop_counts()["Global"].items()}
    linear = [sum(flops for kind, flops in count.items() if "attention" not in kind) for count in counts.values()]
    assert linear[0] > 1e6
    assert abs(linear[0] / linear[1] - 1) < 0.01  # the products of the uniformity differ a little


def test_what_is_kept_does_not_grow_with_memory_times_context(monkeypatch, capsys, tmp_path):
    arguments = [*TINY, "--rounds", "1", "--matrix_size", "64", "--output", str(tmp_path / "new" / "smt")]
    monkeypatch.setattr(sys, "argv", ["benchmark_smt.py", *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    assert (tmp_path / "new" / "smt.md").read_text(encoding="utf-8") == printed
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()]
    assert [line[0] for line in cells if line[0] in ("SMT", "yardstick", "BPTT")] == ["SMT", "yardstick", "BPTT"]
    rows = [[float(cell) for cell in line] for line in cells if line[0].isdigit()]
    assert [row[:2] for row in rows] == [[2, 3], [4, 3], [8, 3], [8, 6]]
    per_token = [row[3] for row in rows]
    assert max(per_token) < 3 * min(per_token)
    assert rows[3][4] > 1.5 * rows[2][4]  # BPTT keeps every memory token of every step
