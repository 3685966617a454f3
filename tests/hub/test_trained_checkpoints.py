"""model_cards/ has a trained model of every family, without code; an upload of each loads without the package."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_recurrent.checkpoints.fingerprints import weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import read_provenance
from hf_recurrent.hub.checkpoint import save_checkpoint_for_hub

ROOT = Path(__file__).parents[2]
REPOSITORIES = sorted(path.parent for path in (ROOT / "model_cards").glob("*/config.json"))
FILES = {
    "README.md", "config.json", "generation_config.json", "model.safetensors", "provenance.json", "tokenizer.json",
    "tokenizer_config.json", "training_curve.png",
}  # fmt: skip
RENEW = "run scripts/train_released_models.py --cards --output_dir model_cards"
BARE = "hf_recurrent,modeling,trainers"
TEXT = '''def read(path):
    """Return the lines of a file."""
    with open(path) as file:
        return [line.rstrip() for line in file]
'''
# Arguments: the file to write, modules that cannot be imported, and folders of checkpoints.
PROGRAM = """
import sys
for name in sys.argv[2].split(","):
    sys.modules[name] = None
import torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
try:
    import hf_recurrent
except ImportError:
    origin = "transformers_modules."
else:
    origin = "hf_recurrent."
results = {}
for folder in map(Path, sys.argv[3:]):
    options = {"trust_remote_code": True, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    assert type(model).__module__.startswith(origin), type(model)
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(bytes(range(256)))) == bytes(range(256))
    prompt = tokenizer("import ", return_tensors="pt")
    with torch.no_grad():
        results[f"{folder.name} logits"] = model(**prompt).logits
    results[f"{folder.name} tokens"] = model.generate(**prompt, max_new_tokens=40, do_sample=False)
save_file(results, sys.argv[1])
"""


@pytest.fixture(scope="module", params=REPOSITORIES, ids=lambda path: path.name)
def repository(request):
    return request.param


@pytest.fixture(scope="module")
def model(repository):
    return AutoModelForCausalLM.from_pretrained(repository)


def test_every_repository_is_made_by_the_script_without_code():
    script = runpy.run_path(str(ROOT / "scripts" / "train_released_models.py"))
    assert {path.name for path in REPOSITORIES} <= script["CHECKPOINTS"].keys()
    for repository in REPOSITORIES:
        card = (repository / "README.md").read_text(encoding="utf-8")
        assert card == script["renewed_card"](repository).content, RENEW
        assert {path.name for path in repository.iterdir()} == FILES
        for name in ("config.json", "tokenizer_config.json"):
            assert "auto_map" not in json.loads((repository / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("trust_remote_code", [None, False, True])
def test_they_load_with_the_package_whatever_is_trusted(trust_remote_code):
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    for repository in REPOSITORIES:
        for auto_class in (AutoModelForCausalLM, AutoTokenizer):
            loaded = auto_class.from_pretrained(repository, **options)
            assert type(loaded).__module__.startswith("hf_recurrent."), type(loaded)


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


def test_the_guide_has_its_numbers(repository, model):
    (result,) = read_provenance(repository).current_results()
    size = (repository / "model.safetensors").stat().st_size / 1e6
    row = (
        f"| `{repository.name}` | {model.num_parameters():,} | {result.metrics['bits_per_byte']:.3f} | {size:.1f} MB |"
    )
    assert row in (ROOT / "docs/reference/models.md").read_text(encoding="utf-8")


def test_the_model_knows_python(repository, model):
    tokens = AutoTokenizer.from_pretrained(repository)(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert loss / torch.log(torch.tensor(2.0)) < 3.2  # a first guess has 8


@pytest.mark.long
def test_an_upload_of_each_loads_without_the_package_and_computes_the_same_bits(tmp_path):
    for repository in REPOSITORIES:
        model, tokenizer = (kind.from_pretrained(repository) for kind in (AutoModelForCausalLM, AutoTokenizer))
        names = save_checkpoint_for_hub(model, tokenizer, tmp_path / repository.name, "# A card")
        code = {name for name in names if name.endswith(".py")}
        assert len(code) == 5 and {"recurrent_shared.py", "tokenization_byte.py"} < code

    def run(hidden: str) -> dict[str, torch.Tensor]:
        unset = ("PYTHONPATH", "HF_", "HUGGING", "TRANSFORMERS_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if hidden != BARE:
            environment["PYTHONPATH"] = str(ROOT)
        folders = [str(tmp_path / repository.name) for repository in REPOSITORIES]
        program = [sys.executable, "-c", PROGRAM, str(tmp_path / "results.safetensors"), hidden, *folders]
        result = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert result.returncode == 0, result.stderr[-3000:]
        return load_file(tmp_path / "results.safetensors")

    without, expected = run(BARE), run("hf_recurrent.kernels")  # compiled kernels round differently
    assert len(without) == 2 * len(REPOSITORIES) and without.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(without[name], tensor), name
