import runpy
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark_tokenizer.py"


def test_it_prints_rates_beside_limit_and_peers(monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--megabytes", "0.01", "--rounds", "1"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    torch.set_num_threads(threads)
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[-4:]]
    names = [row[0].strip() for row in rows]
    assert names == ["limit", "ByteTokenizer", "fast tokenizer", "ByT5Tokenizer"]
    assert all(float(cell) >= 0 for row in rows for cell in row[1:])
