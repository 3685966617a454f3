"""model_cards/ has a trained model of every family: complete repositories with the weights that were measured."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_recurrent.modeling
from hf_recurrent.checkpoints.fingerprints import weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import read_provenance
from hf_recurrent.hub.checkpoint import check_self_contained

ROOT = Path(__file__).parents[2]
CODE = Path(hf_recurrent.modeling.__file__).parent
REPOSITORIES = sorted(path.parent for path in (ROOT / "model_cards").glob("*/config.json"))
TEXT = '''def read(path):
    """Return the lines of a file."""
    with open(path) as file:
        return [line.rstrip() for line in file]
'''
WITHOUT_PACKAGE = """
import sys
sys.modules["hf_recurrent"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
output = model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=40, do_sample=False)
print(tokenizer.decode(output[0]))
"""


@pytest.fixture(scope="module", params=REPOSITORIES, ids=lambda path: path.name)
def repository(request):
    return request.param


@pytest.fixture(scope="module")
def model(repository):
    return AutoModelForCausalLM.from_pretrained(repository)


def test_every_repository_is_made_by_the_script_and_all_are_small():
    script = runpy.run_path(str(ROOT / "scripts" / "train_checkpoints.py"))
    assert [path.name for path in REPOSITORIES] == sorted(script["CHECKPOINTS"])
    files = [file for repository in REPOSITORIES for file in repository.rglob("*") if "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) < 12e6
    assert {file.suffix for file in files} <= {".json", ".md", ".png", ".py", ".safetensors"}


def test_the_code_is_that_of_the_package(repository):
    check_self_contained(repository)
    for file in repository.glob("*.py"):
        same = file.read_bytes() == (CODE / file.name).read_bytes()
        assert same, f"{file} is old; run scripts/train_checkpoints.py --refresh_code"


def test_the_weights_are_those_that_were_measured(repository, model):
    assert model.dtype == torch.float32
    provenance = read_provenance(repository)
    assert weights_fingerprint(model) == provenance.weights
    (result,) = provenance.current_results()
    card = ModelCard.load(repository / "README.md")
    assert [found.metric_value for found in card.data.eval_results] == [round(result.metrics["bits_per_byte"], 4)]
    with safe_open(repository / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118 (not a dictionary)
    narrow = sum(tensor.numel() for tensor in tensors if tensor.dtype == torch.bfloat16)
    assert narrow / sum(tensor.numel() for tensor in tensors) > 0.95
    assert "auto_map" in json.loads((repository / "config.json").read_text(encoding="utf-8"))


def test_the_guide_has_its_numbers(repository, model):
    (result,) = read_provenance(repository).current_results()
    size = (repository / "model.safetensors").stat().st_size / 1e6
    row = (
        f"| `{repository.name}` | {model.num_parameters():,} | {result.metrics['bits_per_byte']:.3f} | {size:.1f} MB |"
    )
    assert row in (ROOT / "docs/guide.md").read_text(encoding="utf-8")


def test_the_model_knows_python(repository, model):
    tokens = AutoTokenizer.from_pretrained(repository)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert loss / torch.log(torch.tensor(2.0)) < 3.2  # a first guess has 8


@pytest.mark.long
def test_it_loads_as_it_lies_without_the_package(repository):
    program = [sys.executable, "-c", WITHOUT_PACKAGE, str(repository)]
    result = subprocess.run(program, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.startswith("import ")
