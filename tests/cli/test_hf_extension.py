"""`hf recurrent`: the commands as an extension of `hf`, through huggingface_hub's own code; and results as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_recurrent.cli.main import main

extensions = pytest.importorskip("huggingface_hub.cli.extensions")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A program of the name that pip would install, next to a Python."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_DISABLE_UPDATE_CHECK", "1")
    path = tmp_path / "bin" / "hf-recurrent"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hf_recurrent.cli.main "$@"\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path.parent / "python"))
    return path


@pytest.mark.skipif(os.name == "nt", reason="a shell script stands for the program")
def test_hf_runs_the_commands_and_passes_their_status_on(program, capsys):
    main(["hf-extension"])
    main(["hf-extension"])  # again, as after an update
    assert capsys.readouterr().out.splitlines()[-1] == f"hf recurrent now runs {program}"
    manifest = extensions.ExtensionManifest.load(program.parents[1] / ".local/share/hf/extensions/hf-recurrent")
    assert manifest.executable_path == str(program)
    python = program.read_text().split('"')[1]
    hf = [python, "-c", "from huggingface_hub.cli.hf import main; main()", "recurrent"]
    done = subprocess.run([*hf, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("hf-recurrent "), done.stderr
    wrong = subprocess.run([*hf, "trane"], capture_output=True, text=True)
    assert wrong.returncode == 2 and "unknown command 'trane'" in wrong.stderr


def test_without_a_program_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit) as stop:
        main(["hf-extension"])
    assert stop.value.code == 2 and "install the package with pip first" in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    from hf_recurrent import ByteTokenizer, config_from_preset
    from hf_recurrent.hub.checkpoint import save_checkpoint_for_hub

    config = config_from_preset("hawk-tiny", hidden_size=16, state_size=24, num_hidden_layers=1)
    directory = tmp_path_factory.mktemp("json") / "hawk"
    save_checkpoint_for_hub(AutoModelForCausalLM.from_config(config), ByteTokenizer(), directory)
    return str(directory)


def result(capsys) -> dict:
    """All of standard output as one value."""
    return json.loads(capsys.readouterr().out)


def test_generated_texts_as_json(checkpoint, capsys):
    words = ["generate", checkpoint, "--json", "--greedy", "--max_new_tokens", "4", "--prompt"]
    main([*words, "one"])
    (one,) = result(capsys)["texts"]
    main([*words, "one", "two"])
    texts = result(capsys)["texts"]
    assert texts[0] == one and [text["prompt"] for text in texts] == ["one", "two"]
    main([*words, "one", "--draft", checkpoint])
    assert result(capsys)["texts"] == [one]


def test_uploads_and_exports_as_json(checkpoint, capsys, tmp_path):
    main(["push-to-hub", checkpoint, "me/hawk", "--dry_run", "--json"])
    shown = result(capsys)
    assert shown["repo_id"] == "me/hawk" and shown["url"] is None and shown["bytes"]["model.safetensors"] > 0
    main(["export", checkpoint, "--output_dir", str(tmp_path / "step"), "--json"])
    shown = result(capsys)
    assert Path(shown["output_dir"], shown["program"]).stat().st_size == shown["bytes"][shown["program"]]
