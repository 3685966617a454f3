"""Commands with `--json` print their results, and nothing else, on standard output."""

import json
from pathlib import Path

import pytest

from hf_recurrent.cli.main import main


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
