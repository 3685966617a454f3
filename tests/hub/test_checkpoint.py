import pytest
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.cli.push_to_hub import main as push_to_hub
from hf_recurrent.hub.checkpoint import save_checkpoint_for_hub


def tiny():
    config = config_from_preset("hawk-tiny", hidden_size=16, state_size=24, num_hidden_layers=1)
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "hawk"
    names = save_checkpoint_for_hub(tiny(), ByteTokenizer(), directory)
    assert names == sorted(path.name for path in directory.iterdir())
    return directory


def test_plain_save_pretrained_writes_the_code_too(tmp_path):
    tiny().save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"modeling_hawk.py", "configuration_hawk.py", "tokenization_byte.py", "model.safetensors"}


def test_an_incomplete_checkpoint_is_refused_and_the_old_one_kept(tmp_path, monkeypatch):
    directory = tmp_path / "hawk"
    save_checkpoint_for_hub(tiny(), ByteTokenizer(), directory, "first card")
    weights = (directory / "model.safetensors").read_bytes()
    model = tiny()
    monkeypatch.setattr(type(model), "_auto_class", None)  # as if its class had not been registered
    with pytest.raises(ValueError, match="register_for_auto_class"):
        save_checkpoint_for_hub(model, ByteTokenizer(), directory, "second card")
    assert (directory / "README.md").read_text() == "first card"
    assert (directory / "model.safetensors").read_bytes() == weights
    assert [path.name for path in tmp_path.iterdir()] == ["hawk"]


def test_dry_run_shows_files_and_card_and_needs_no_hub(checkpoint, capsys, tmp_path):
    push_to_hub([str(checkpoint), "me/hawk", "--dry_run", "--license", "mit"])
    shown = capsys.readouterr().out
    assert "Would upload to me/hawk" in shown and "model.safetensors" in shown and "license: mit" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent", "me/hawk"], "`PATH` is 'absent'; directory not found."),
        (["CHECKPOINT", "me/hawk/deep"], "me/hawk/deep"),
        (["CHECKPOINT", "me/hawk", "--token", "x"], "unrecognized arguments: --token"),
    ],
)
def test_bad_input_ends_with_one_sentence(checkpoint, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        push_to_hub([argument.replace("CHECKPOINT", str(checkpoint)) for argument in arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
