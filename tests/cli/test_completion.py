"""`hf-recurrent completion`: scripts for shells, tried in a real bash without Python."""

import shutil
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from hf_recurrent.cli.completion import SHELLS, main
from hf_recurrent.cli.main import COMMANDS
from hf_recurrent.cli.pretrain_help import METHODS

# Fills the variables that bash gives to the function of a command, calls it and prints what it offers.
ASK = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
"$FUNCTION"
printf '%s\\n' "${COMPREPLY[@]}"
"""
bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    pytest.importorskip("shtab")
    path = tmp_path_factory.mktemp("completion") / "hf-recurrent"
    with open(path, "w", encoding="utf-8") as file, redirect_stdout(file):
        main(["bash"])
    return path


def complete(script, folder, *words: str) -> set[str]:
    """The words that bash offers for the last of `words`, in a shell without any program."""
    registered = script.read_text().strip().splitlines()[-1].split()
    assert registered[0] == "complete" and registered[-1] == "hf-recurrent"
    function = registered[registered.index("-F") + 1]
    command = [shutil.which("bash"), "-c", ASK, "bash", str(script), "hf-recurrent", *words]
    found = subprocess.run(
        command, env={"PATH": "", "FUNCTION": function}, cwd=folder, capture_output=True, text=True, timeout=20
    )
    assert not found.stderr
    return set(found.stdout.split())


@bash
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pre"], {"pretrain"}),
        ([""], set(COMMANDS)),
        (["push"], {"push-to-hub"}),
        (["generate", "m", "--max_n"], {"--max_new_tokens"}),
        (["learn", "m", "--method", ""], {"rtrl", "snap1", "truncated", "spatial"}),
        (["score", "m", "f", "--per", "l"], {"line"}),
        (["pretrain", "--dmt_s"], {"--dmt_steps"}),
        (["pretrain", "--strid"], {"--stride"}),
        (["pretrain", "--method", ""], {*METHODS}),
        (["pretrain", "--save_strategy", "e"], {"epoch"}),
        (["pretrain", "--torch_comp"], {"--torch_compile", "--torch_compile_backend", "--torch_compile_mode"}),
        (["pretrain", "--recipe", "memora-s"], {"memora-s0"}),
        (["pretrain", "--model", "memora-t"], {"memora-tiny", "memora-tinystories"}),
        (["chat", "no"], {"notes.txt"}),
        (["score", "m", "no"], {"notes.txt"}),
        (["pretrain", "--corpus", "no"], {"notes.txt"}),
        (["completion", ""], set(SHELLS)),
    ],
)
def test_bash_completes(words, expected, script, tmp_path):
    (tmp_path / "notes.txt").touch()
    found = complete(script, tmp_path, *words)
    assert found >= expected and {word for word in found if not word.startswith("-")} <= expected | COMMANDS.keys()
    assert found == expected or not words[-1]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_every_command(shell, capsys):
    pytest.importorskip("shtab")
    main([shell])
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS) and "--max_new_tokens" in out


def test_without_shtab(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stop:
        main(["bash"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and "pip install 'hf-recurrent[completion]'" in error and error.count("\n") == 1
