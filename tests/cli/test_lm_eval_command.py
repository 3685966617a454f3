"""`hf-recurrent lm-eval`: the harness itself is tried in tests/clients/rows_evaluation.py, where it is installed."""

import sys

import pytest

from hf_recurrent.cli.main import main


def test_a_missing_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as ended:
        main(["lm-eval", "ls", "tasks"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert ended.value.code == 2 and line.endswith('install it with pip install "hf-recurrent[lm-eval]"')
