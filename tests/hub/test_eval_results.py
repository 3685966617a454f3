"""Results as data, read by the parsers of huggingface_hub."""

import json
import shutil
from dataclasses import replace

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from transformers import AutoModelForCausalLM

from hf_recurrent import ByteTokenizer, config_from_preset
from hf_recurrent.checkpoints.provenance_files import read_provenance, remember_provenance
from hf_recurrent.checkpoints.records import Data, Provenance, Result
from hf_recurrent.cli.evaluate import main as evaluate
from hf_recurrent.hub.checkpoint import save_checkpoint_for_hub
from hf_recurrent.hub.eval_results import EVAL_RESULTS_FILE, eval_result_entries, write_eval_results
from hf_recurrent.hub.model_card import Statements, create_model_card

METRICS = {"bits_per_byte": 2.0512345678, "network_bits_per_byte": 2.2, "num_bytes": 1234567, "num_episodes": 33}
HUB = Result(1, 7, "w", Data("hub:roneneldan/TinyStories", "f"), METRICS, {"state_carried": True})


def of(*results: Result, weights: str = "w") -> Provenance:
    return Provenance(results=list(results), weights=weights)


def read(directory):
    return parse_eval_result_entries(yaml.safe_load((directory / EVAL_RESULTS_FILE).read_text(encoding="utf-8")))


def tiny():
    config = config_from_preset("hawk-tiny", hidden_size=16, state_size=24, num_hidden_layers=1)
    return AutoModelForCausalLM.from_config(config)


def test_a_measurement_on_a_dataset_of_the_hub_is_an_entry_a_metric(tmp_path):
    assert write_eval_results(of(HUB), tmp_path)
    first, second = read(tmp_path)
    assert (first.dataset_id, first.task_id, first.value) == ("roneneldan/TinyStories", "bits_per_byte", 2.051235)
    assert first.notes == "Bits per byte, held-out data (1,234,567 bytes in 33 episodes), the state carried"
    assert (second.task_id, second.value) == ("network_bits_per_byte", 2.2)


@pytest.mark.parametrize(
    "provenance",
    [
        of(),
        of(HUB, weights="others"),
        of(replace(HUB, settings={"split": "train"})),
        of(replace(HUB, settings={"split": "stream"})),
        of(replace(HUB, data=Data("python", "f"))),
        of(replace(HUB, data=Data("hub:folder", "f"))),
        of(replace(HUB, data=Data("hub:a/b, hub:c/d", "f"))),
    ],
    ids=["none", "other weights", "training data", "a stream", "local data", "a local folder", "a mixture"],
)
def test_nothing_else_is_written_and_an_older_file_goes(tmp_path, provenance):
    write_eval_results(of(HUB), tmp_path)
    assert eval_result_entries(provenance) == [] and not write_eval_results(provenance, tmp_path)
    assert not (tmp_path / EVAL_RESULTS_FILE).exists()


def test_a_saved_checkpoint_has_the_file_of_its_present_weights(tmp_path):
    model = tiny()
    remember_provenance(model, of(HUB, weights="w"))  # of weights that this model does not have
    assert EVAL_RESULTS_FILE not in save_checkpoint_for_hub(model, ByteTokenizer(), tmp_path / "model")
    current = read_provenance(tmp_path / "model").weights
    remember_provenance(model, of(replace(HUB, weights=current), weights=current))
    assert EVAL_RESULTS_FILE in save_checkpoint_for_hub(model, ByteTokenizer(), tmp_path / "model")
    assert [entry.task_id for entry in read(tmp_path / "model")] == ["bits_per_byte", "network_bits_per_byte"]
    card = ModelCard.load(tmp_path / "model" / "README.md", ignore_metadata_errors=False)
    assert [result.metric_type for result in card.data.eval_results] == ["bits_per_byte", "network_bits_per_byte"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A checkpoint with an author's card, and its evaluation on a folder that stands for a dataset of the Hub."""
    work = tmp_path_factory.mktemp("recorded")
    model = tiny()
    statements = Statements(repo_id="me/small", comparisons={"xz -9": 1.9})
    card = create_model_card(model, of(Result(0, 0, "w", Data("python", "f"), {"bits_per_byte": 3.0})), statements)
    save_checkpoint_for_hub(model, ByteTokenizer(), work / "model", f"{card}\n\nA sentence of the author.\n")
    (work / "book.txt").write_text("It was a dark night, and nobody came. " * 20)
    return work


def run(recorded, *arguments: str) -> list[str]:
    return [
        str(recorded / "model"), "--corpus", str(recorded / "book.txt"), "--record", "--quiet", "--no_compressors",
        *arguments,
    ]  # fmt: skip


def test_an_evaluation_is_recorded_in_the_checkpoint_and_its_card(recorded, capsys):
    evaluate(run(recorded, "--json"))
    shown = json.loads(capsys.readouterr().out)
    evaluate(run(recorded))  # again: it is replaced
    provenance = read_provenance(recorded / "model")
    (result,) = provenance.current_results()
    assert result.metrics["bits_per_byte"] == pytest.approx(shown["bits_per_byte"], rel=1e-12)
    assert result.settings == {"block_size": 1024, "state_carried": True, "split": "validation"}
    card = ModelCard.load(recorded / "model" / "README.md", ignore_metadata_errors=False)
    (entry,) = card.data.eval_results
    assert (entry.dataset_name, entry.metric_value) == ("book.txt", round(shown["bits_per_byte"], 4))
    assert f"| **{shown['bits_per_byte']:.4f}** |" in card.text and "| **3.0000** |" not in card.text
    assert "| xz -9 | 1.9000 |" in card.text and "A sentence of the author." in card.text
    assert card.data.model_name == "small" and card.text.count("## Evaluation") == 1
    assert not (recorded / "model" / EVAL_RESULTS_FILE).exists()  # not on the Hub


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "all"], "`--record` needs held-out data; `--split` is all, which has the training data too."),
        (["--quantize", "int8"], "`--record` cannot be combined with `--quantize`"),
    ],
)
def test_what_is_not_a_result_of_the_checkpoint_is_refused(recorded, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        evaluate(run(recorded, *arguments))
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_only_a_directory_can_be_recorded_in(recorded, capsys):
    with pytest.raises(SystemExit) as end:
        evaluate(["me/absent", *run(recorded)[1:]])
    assert end.value.code == 2 and "`MODEL` is 'me/absent'; directory not found." in capsys.readouterr().err
    shutil.rmtree(recorded)
