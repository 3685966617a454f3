"""`hf-recurrent transformers`: the commands of transformers know our classes."""

import importlib

import pytest

from hf_recurrent import MemoraForCausalLM
from hf_recurrent.cli import transformers as command
from hf_recurrent.cli.main import main


def test_the_classes_are_found_by_name():
    command.add_model_classes()
    library = importlib.import_module("transformers")
    assert library.MemoraForCausalLM is MemoraForCausalLM
    assert library.HawkForSequenceClassification.__module__ == "hf_recurrent.modeling.modeling_hawk"


def test_the_commands_of_transformers_are_listed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["transformers", "--help"])
    assert ended.value.code == 0 and "serve" in capsys.readouterr().out


def test_a_missing_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("transformers.cli.serve.is_serve_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["transformers", "serve", "somewhere"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-recurrent transformers: error: Missing dependencies for serving.")
