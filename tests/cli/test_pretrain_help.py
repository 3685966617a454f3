"""`hf-recurrent pretrain --help` is read from source, and says what the dataclasses say."""

import dataclasses
import subprocess
import sys

import pytest

from hf_recurrent.cli import pretrain_arguments, pretrain_help
from hf_recurrent.cli.main import main
from hf_recurrent.learning_rules.rules import RULES
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments

QUICK = """
import sys
from hf_recurrent.cli.main import main
try:
    main(["pretrain", "--help"])
finally:
    print(sorted({"torch", "transformers", "numpy"} & {name.partition(".")[0] for name in sys.modules}))
"""


def test_help_imports_neither_torch_nor_transformers():
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert done.stdout.startswith("usage: hf-recurrent pretrain") and "--train_bytes" in done.stdout


@pytest.mark.parametrize("method", pretrain_help.METHODS)
def test_names_defaults_and_texts_are_those_of_the_dataclasses(method):
    parser = pretrain_arguments.build_parser(method)
    fields = {field.name: field for kind in parser.dataclass_types for field in dataclasses.fields(kind)}
    arguments = [one for group in pretrain_help.groups(method).values() for one in group]
    for one in arguments:
        assert one.default == parser.get_default(one.name), one.name
        if one.name not in {name for name, _, _ in pretrain_help._OTHERS}:
            assert one.help == fields[one.name].metadata["help"]
    assert len({one.name for one in arguments}) == len(arguments)
    kinds = [kind for kind in parser.dataclass_types if not issubclass(kind, MultiStreamTrainingArguments)]
    assert {field.name for kind in kinds for field in dataclasses.fields(kind)} <= {one.name for one in arguments}


def test_methods_are_those_of_the_trainers():
    assert ("bptt", *RULES, "smt", "dmt") == pretrain_help.METHODS


@pytest.mark.parametrize(
    ("words", "expected", "unexpected"),
    [
        ("--help", ["(recipe: 0.008)", "(default: 0.1)", "--sample_every"], ["--torch_compile", "--dmt_batch_size"]),
        ("--method smt -h", ["--dmt_steps", "--future_length"], ["--rollout_length", "--stride"]),
        ("--recipe smt -h", ["--dmt_steps", "--future_length"], ["--rollout_length", "--stride"]),
        ("--method=rtrl --help", ["--stride"], ["--dmt_batch_size"]),
        ("--recipe none --help", ["(default: 0.0003)"], ["(recipe:"]),
        ("--help-all", ["--torch_compile", "--train_bytes"], []),
    ],
)
def test_short_and_long_help(words, expected, unexpected, capsys):
    try:
        main(["pretrain", *words.split()])
    except SystemExit as stop:
        assert not stop.code
    out = capsys.readouterr().out
    assert all(word in out for word in expected) and not any(word in out for word in unexpected)
    if "all" not in words:
        assert max(map(len, out.splitlines())) < 110


@pytest.mark.parametrize("words", ["--recipe absent.yaml --help", "--method uoro --help"])
def test_help_for_something_that_does_not_exist(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["pretrain", *words.split()])
    assert stop.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1
