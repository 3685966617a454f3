import json
from importlib.resources import files

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_recurrent import config_from_preset
from hf_recurrent.checkpoints.privacy import REDACTED, redact_secrets
from hf_recurrent.checkpoints.records import Data, Provenance, Result
from hf_recurrent.hub.model_card import Statements, create_model_card, describe_parameters
from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS


@pytest.fixture(scope="module")
def model():
    config = config_from_preset("memora-tiny", hidden_size=16, state_size=24, num_hidden_layers=2)
    return AutoModelForCausalLM.from_config(config)


def measured(corpus: str, bits_per_byte: float) -> Provenance:
    """Weights of which nothing is known but a measurement."""
    metrics = {"bits_per_byte": bits_per_byte, "num_bytes": 1234567, "num_episodes": 33}
    return Provenance(results=[Result(0, 0, "w", Data(corpus, "f"), metrics)], weights="w")


def test_the_metadata_are_what_the_hub_reads(model):
    statements = Statements(repo_id="me/small", language="en")
    card = create_model_card(model, measured("hub:roneneldan/TinyStories", 2.05126), statements)
    data = ModelCard(card.content, ignore_metadata_errors=False).data  # parsed again from the text
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "transformers", "text-generation")
    assert data.language == "en" and data.model_name == "small"
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("bits_per_byte", 2.0513)
    assert (result.dataset_type, result.dataset_split) == ("roneneldan/TinyStories", "validation")
    assert "1,234,567 bytes in 33 episodes" in card.content
    assert "How these weights were trained was not recorded." in card.content


def test_the_text_says_how_it_was_made_and_how_to_load_it(model):
    statements = Statements(repo_id="me/small", comparisons={"xz -9": 1.9})
    text = create_model_card(model, measured("python", 2.5), statements).content
    for part in (
        "was not recorded",
        f"Parameters: {model.num_parameters():,};",
        f"state per stream: {2 * 24 * 4} bytes.",
        "| **Bits per byte, held-out data of the Python standard library's source",
        "| **2.5000** |",
        "| xz -9 | 1.9000 |",
        'AutoModelForCausalLM.from_pretrained("me/small", trust_remote_code=True)',
        "Sequence Learning from Continuous Streams of Data (Anonymous authors, ",
        "Your text",
    ):
        assert part in text, part
    assert "{{" not in text and "{%" not in text and "\n\n\n" not in text


def test_tables_are_counted_apart(model):
    fields = {
        "hidden_size": 16,
        "state_size": 24,
        "num_hidden_layers": 2,
        "ngram_orders": [2, 3],
        "ngram_rows": 1 << 15,
    }
    with_tables = AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **fields))
    text = create_model_card(with_tables).content
    assert f"Parameters: {model.num_parameters():,}; parameters in tables of n-grams: 1,048,576;" in text
    assert describe_parameters(with_tables) == f"{model.num_parameters():,} parameters and 1.0 M in tables"
    assert describe_parameters(model) == f"{model.num_parameters():,} parameters"


def test_nothing_is_claimed_that_was_not_measured(model):
    card = create_model_card(model)
    assert card.data.eval_results is None and "These weights were not evaluated" in card.content
    assert "Machine" not in card.content and "held-out" not in card.content


def test_every_family_and_unit_has_its_papers():
    known = json.loads(files("hf_recurrent.hub").joinpath("papers.json").read_text(encoding="utf-8"))
    listed = {key for kind in ("families", "units", "methods") for keys in known[kind].values() for key in keys}
    own = {name for name, unit in RECURRENT_UNITS.items() if unit.__module__.startswith("hf_recurrent.")}
    assert listed <= known["papers"].keys() and own <= known["units"].keys()


def test_a_baseline_without_a_state_has_a_card_too():
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    text = create_model_card(LlamaForCausalLM(config), measured("python", 3.0)).content
    assert "state per stream" not in text and "state carried" not in text and "output.state" not in text


def test_secrets_and_local_paths_stay_here(model, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    monkeypatch.setenv("SHORT_TOKEN", "data")  # shorter than any token: an ordinary word, not to be torn out
    token = "hf_" + "aB3" * 11
    statements = Statements(tags=["0123456789abcdef0123"], model_name=token)
    text = create_model_card(model, statements=statements).content
    assert token not in text and "0123456789abcdef0123" not in text and REDACTED in text
    assert redact_secrets(f"a {token} b") == f"a {REDACTED} b"
