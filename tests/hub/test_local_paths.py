"""Nothing that is published names a path of this machine."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.checkpoints.privacy import find_local_path
from hf_recurrent.cli.push_to_hub import main as push_to_hub
from hf_recurrent.hub.checkpoint import save_checkpoint_for_hub
from hf_recurrent.hub.model_card import create_model_card


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A model loaded from a directory below the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    directory = tmp_path / "alice" / "project" / "model"
    config = config_from_preset("hawk-tiny", hidden_size=16, state_size=16, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    ByteTokenizer().save_pretrained(directory)
    return directory


def texts(directory: Path) -> str:
    return "".join(path.read_text() for path in directory.rglob("*") if path.suffix in (".json", ".md", ".py"))


def change_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_loaded_model_is_saved_without_its_place(checkpoint, tmp_path):
    model, tokenizer = (kind.from_pretrained(checkpoint) for kind in (AutoModelForCausalLM, AutoTokenizer))
    save_checkpoint_for_hub(model, tokenizer, tmp_path / "new", create_model_card(model))
    assert "alice" not in texts(tmp_path / "new") and str(tmp_path) not in texts(tmp_path / "new")


@pytest.mark.parametrize(
    ("file", "key", "nested"),
    [
        ("config.json", "source", False),
        ("config.json", "source", True),
        ("tokenizer_config.json", "source", False),
        ("tokenizer_config.json", "source", True),
        ("generation_config.json", "stop_strings", False),
    ],
)
def test_a_path_in_a_configuration_is_refused_before_anything_is_written(checkpoint, file, key, nested, capsys):
    path = str(checkpoint)
    change_json(checkpoint / file, **{key: {"a": [1, path]} if nested else path})
    with pytest.raises(SystemExit):
        push_to_hub([str(checkpoint), "me/hawk", "--dry_run"])
    output = capsys.readouterr()
    assert f"`{file}` has the local path {path!r}, which would be published" in output.err
    assert not output.out


@pytest.mark.parametrize("path", ["{HOME}/books/a.txt", "{TMP}/b/c", "C:\\Users\\alice\\d", "~/books/e"])
def test_a_path_in_the_card_is_refused(checkpoint, path, capsys, tmp_path):
    path = path.format(HOME=tmp_path / "alice", TMP=tmp_path)
    (checkpoint / "README.md").write_text(f"# Mine\n\nTrained on `{path}`, see https://example.org/home/a/b.\n")
    with pytest.raises(SystemExit):
        push_to_hub([str(checkpoint), "me/hawk", "--dry_run"])
    assert f"`README.md` has the local path {path!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["and/or", "https://hf.co/home/me/x", "POST /v1/chat/completions", "#!/usr/bin/env python", "/home", "1/2/3 a/b"],
)
def test_other_slashes_are_no_paths(text):
    assert find_local_path(text) is None


def test_an_adapter_names_no_local_base_model(checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"`adapter_config.json` has the local path"):
        save_checkpoint_for_hub(adapted, ByteTokenizer(), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    adapted.peft_config["default"].base_model_name_or_path = "me/hawk"
    names = save_checkpoint_for_hub(adapted, ByteTokenizer(), tmp_path / "new")
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(names)
