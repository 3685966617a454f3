"""`hf-recurrent transformers`: the commands of transformers know our classes."""

import subprocess
import sys

import pytest

from hf_recurrent.cli.main import main

CODE = """
from hf_recurrent.cli.transformers import add_model_classes
add_model_classes()
from transformers.cli.serving import model_manager  # the module that looks them up
for name in ("MemoraForCausalLM", "HawkForSequenceClassification", "MgradeModel"):
    print(getattr(model_manager.transformers, name).__module__)
"""


def test_the_server_finds_the_classes_by_name(commands, tmp_path):
    done = commands.python(["-c", CODE], tmp_path)
    modules = ["memora.modeling_memora", "hawk.modeling_hawk", "mgrade.modeling_mgrade"]
    assert done.stdout.split() == [f"hf_recurrent.modeling.{name}" for name in modules], done.stderr


def test_the_help_imports_nothing_and_that_of_a_command_is_its_own(capsys):
    code = "import sys; from hf_recurrent.cli.main import main; main(['transformers', '--help']); "
    code += "print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("usage: hf-recurrent transformers COMMAND") and done.stdout.endswith("set()\n")
    with pytest.raises(SystemExit) as ended:
        main(["transformers", "serve", "--help"])
    assert ended.value.code == 0 and "--host" in capsys.readouterr().out


def test_a_missing_package_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("transformers.cli.serve.is_serve_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["transformers", "serve", "somewhere"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-recurrent transformers: error: Missing dependencies for serving.")
