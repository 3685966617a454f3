"""Imports of commands: those that need no torch import none, and none searches for cycles while it imports."""

import gc
import subprocess
import sys

import pytest

from hf_recurrent.cli.imports import without_collection
from hf_recurrent.cli.main import COMMANDS

HEAVY = ("torch", "transformers", "transformers.modeling_utils")
PROBE = f"""
import sys
from hf_recurrent.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert not stop.code, stop.code
print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""


def imported(*words: str, cwd) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, cwd=cwd, check=True)
    return done.stderr.splitlines()[-1].split()


# transformers has its own help; evaluate --help needs its parser.
@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"transformers", "lm-eval", "evaluate"}))
def test_help_imports_no_torch(command, tmp_path):
    assert imported(command, "--help", cwd=tmp_path) == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["compress", "empty", "--quiet"], []),
        (["compress", "notes.txt", "--quiet"], []),
        (["watch", "notes.txt", "--no_follow", "--quiet"], []),
        (["env", "--json"], ["torch"]),
    ],
)
def test_commands_import_what_they_need(words, expected, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "notes.txt").write_text("a line\n" * 20)
    assert imported(*words, cwd=tmp_path) == expected
    if words[0] == "compress":
        (tmp_path / words[1]).unlink()
        assert imported("decompress", f"{words[1]}.hfr", "--quiet", cwd=tmp_path) == []


@pytest.mark.parametrize(
    "words", [["score", "absent", "f"], ["evaluate", "./absent"], ["chat", "./absent"], ["serve", "./absent"]]
)
def test_a_missing_model_is_found_before_torch_is_imported(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROBE.replace("assert not stop.code, stop.code", "pass"), *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    error, modules = done.stderr.splitlines()
    assert "directory not found" in error or "`MODEL` is 'absent'" in error
    assert "torch" not in modules.split()


def test_collection_is_as_before():
    assert gc.isenabled()
    with pytest.raises(KeyError), without_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
