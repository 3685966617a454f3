"""Upload over real HTTP in one process, load in another one that cannot import this package."""

import json

import pytest
import yaml
from hub_process import TOKEN, run_program
from huggingface_hub import ModelCard, parse_eval_result_entries
from loopback_hub import LoopbackHub

from hf_recurrent.hub.eval_results import EVAL_RESULTS_FILE

pytestmark = pytest.mark.long
REPOSITORIES = ["memora-whole", "hawk-parts", "hawk-command", "memora-trained", "memora-own", "smt_rnn-whole"]
PRIVATE = "hawk-command"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def hub(work):
    with LoopbackHub(TOKEN) as hub:
        run_program("upload_program.py", hub, work)
        run_program("trainer_program.py", hub, work)
        yield hub


def test_public_checkpoints_load_without_package_and_without_token(hub, work):
    run_program("load_program.py", hub, work, *(name for name in REPOSITORIES if name != PRIVATE), token=False)


def test_a_private_checkpoint_loads_without_the_package(hub, work):
    run_program("load_program.py", hub, work, PRIVATE)


@pytest.mark.parametrize("repository", REPOSITORIES)
def test_a_repository_holds_weights_tokenizer_code_and_card_and_no_pickle(hub, repository):
    files = hub.files(f"tester/{repository}")
    assert {"model.safetensors", "config.json", "tokenizer_config.json", "tokenization_byte.py", "README.md"} <= set(
        files
    )
    family = repository.split("-")[0]
    assert {f"modeling_{family}.py", f"configuration_{family}.py"} <= set(files)
    assert files["model.safetensors"].lfs
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
    auto_map = json.loads(files["config.json"].content)["auto_map"]
    assert {"AutoConfig", "AutoModelForCausalLM"} <= set(auto_map)


def test_the_code_of_a_users_unit_is_in_every_upload_with_it(hub):
    commits = list(hub.repositories["tester/memora-own"].commits.values())
    with_weights = [files for files in commits if "model.safetensors" in files]
    assert len(with_weights) >= 2
    for files in with_weights:
        assert b"from .recurrent_shared import RecurrentUnit, reg" in files["leaky_unit.py"].content
        assert b"from .leaky_unit import LeakyIntegrator" in files["modeling_memora.py"].content
        assert json.loads(files["config.json"].content)["auto_map"]["recurrent_unit"] == "leaky_unit.LeakyIntegrator"
    assert "leaky_unit.py" not in hub.files("tester/memora-whole")


def test_private_means_private(hub):
    assert hub.repositories["tester/hawk-command"].private
    assert not hub.repositories["tester/memora-whole"].private


def test_no_uploaded_file_and_no_commit_holds_the_token(hub):
    for name, repository in hub.repositories.items():
        assert not any(TOKEN in title for title in repository.titles)
        for files in repository.commits.values():
            for path, blob in files.items():
                assert TOKEN.encode() not in blob.content, f"{name}: {path}"


def test_results_are_data_as_long_as_they_are_of_these_weights(hub):
    first, last = list(hub.repositories["tester/smt_rnn-whole"].commits.values())[-2:]
    (entry,) = parse_eval_result_entries(yaml.safe_load(first[EVAL_RESULTS_FILE].content))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("owner/stories", "bits_per_byte", 1.25)
    assert EVAL_RESULTS_FILE not in last and "model.safetensors" in last


def test_cards_state_the_measured_bits_per_byte(hub):
    def card(repository):
        content = hub.files(f"tester/{repository}")["README.md"].content.decode()
        return ModelCard(content, ignore_metadata_errors=False)

    whole = card("memora-whole").data.eval_results[0]
    assert (whole.metric_type, whole.metric_value) == ("bits_per_byte", 2.05)
    parts = card("hawk-parts")  # still ours after a later model.push_to_hub
    assert parts.data.eval_results[0].metric_value == 1.5
    trained = card("memora-trained")
    assert "fine-tuned" not in trained.content and trained.data.eval_results[0].metric_type == "bits_per_byte"
    assert 0 < trained.data.eval_results[0].metric_value < 20
    assert "counting" in trained.content and "Streams (B) | 2" in trained.content
    assert "not evaluated" in card("hawk-command").content
