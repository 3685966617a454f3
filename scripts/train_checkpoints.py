"""Train the small models of model_cards/ and write each one's repository, ready to upload.

    python scripts/train_checkpoints.py                        # all: two and a half hours of one core
    python scripts/train_checkpoints.py lru-tiny-python        # one
    python scripts/train_checkpoints.py --cards                # only write the cards again, from provenance.json

An interrupted run continues from its last checkpoint in runs/NAME. Matrices are rounded to bfloat16 and stored so; the
card has the numbers of the rounded weights on whole held-out files. Loaded, they are float32 unless another `dtype` is
asked for.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent import ByteTokenizer
from hf_recurrent.checkpoints.fingerprints import weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import find_provenance, read_provenance, remember_provenance
from hf_recurrent.checkpoints.records import Data, Provenance, Sample
from hf_recurrent.cli.data_arguments import DataArguments, load_evaluation_source
from hf_recurrent.data.episode_source import EvaluationShare
from hf_recurrent.evaluation.compressors import compressed_bits_per_byte
from hf_recurrent.evaluation.samples import generate_samples
from hf_recurrent.export.weight_types import round_weights
from hf_recurrent.hub.checkpoint import save_checkpoint_for_hub
from hf_recurrent.hub.model_card import Statements, create_model_card

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "model_cards"
OWNER = "hf-recurrent"
ROUNDED = "After training, matrices were rounded to bfloat16."
_TINY = "--recipe default --train_bytes 8e6 --block_size 128"
# Repository → arguments of `hf-recurrent pretrain`.
CHECKPOINTS = {
    "memora-s0-python": "--recipe memora-s0 --config_overrides norm_eps=1e-6 --accounts false",
    "hawk-tiny-python": f"{_TINY} --model hawk-tiny",
    "lru-tiny-python": f"{_TINY} --model lru-tiny",
    "mgrade-tiny-python": f"{_TINY} --model mgrade-tiny",
    "smt-rnn-tiny-python": "--recipe smt --max_steps 4000 --dmt_steps 400",
}


def train(name: str) -> Path:
    """Train, or continue; returns the directory of the run."""
    run = ROOT / "runs" / name
    if not (run / "_recipe.yaml").is_file():  # written last
        arguments = [*shlex.split(CHECKPOINTS[name]), "--output_dir", str(run), "--resume_from_checkpoint", "true"]
        subprocess.run([sys.executable, str(ROOT / "scripts" / "pretrain.py"), *arguments], check=True, cwd=ROOT)
    return run


def publish(name: str, run: Path, batch_size: int) -> None:
    """Round, measure and describe the weights of a run, and write the repository."""
    model = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32).eval()
    tokenizer = ByteTokenizer.from_pretrained(run)
    provenance = find_provenance(model)
    round_weights(model, "bfloat16")
    source = load_evaluation_source(DataArguments(corpus=["python"]), tokenizer, "validation")
    share = EvaluationShare(batch_size=batch_size, progress=True)
    metrics = source.evaluation_metrics(source.evaluate(model, share))
    weights = provenance.weights = weights_fingerprint(model)
    settings = {"block_size": share.block_size, "state_carried": True}
    provenance.results = []
    provenance.add_result(provenance.new_result(weights, Data.of(source), metrics, settings))
    prompt = "class Path"
    text = generate_samples(model, tokenizer, [prompt], 400, temperature=0.7)[0]
    provenance.sample = Sample(prompt, text, weights, 0.7)
    provenance.gaps.append(ROUNDED)
    remember_provenance(model, provenance)
    comparisons = {f"{name}, each file alone": value for name, value in compressed_bits_per_byte(source).items()}
    write(model, tokenizer, name, create_card(model, provenance, name, comparisons))


def create_card(model: PreTrainedModel, provenance: Provenance, name: str, comparisons: dict[str, float]) -> ModelCard:
    """The card of a repository."""
    statements = Statements(repo_id=f"{OWNER}/{name}", license="apache-2.0", comparisons=comparisons)
    return create_model_card(model, provenance, statements, curve=True)


def renewed_card(name: str) -> ModelCard:
    """The card of a repository from its record; the bits per byte of compressors are copied from the present card."""
    folder = FOLDER / name
    rows = re.findall(r"^\| (.*, each file alone) \| ([\d.]+) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    comparisons = {method: float(value) for method, value in rows}
    return create_card(AutoModelForCausalLM.from_pretrained(folder), read_provenance(folder), name, comparisons)


def write(model: PreTrainedModel, tokenizer: ByteTokenizer, name: str, card: ModelCard | str) -> None:
    """Replace the files of a repository, without code: saving and pushing the model add it."""
    folder = FOLDER / name
    save_checkpoint_for_hub(model, tokenizer, folder, card, state_dict=narrow_weights(model))
    for file in folder.glob("*.py"):
        file.unlink()
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        fields = json.loads(path.read_text(encoding="utf-8"))
        del fields["auto_map"]
        path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def narrow_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights by name, those whose values bfloat16 can hold in bfloat16; tied ones stay one tensor."""
    narrow: dict[int, torch.Tensor] = {}
    state = model.state_dict()
    for tensor in state.values():
        if tensor.is_floating_point() and tensor.data_ptr() not in narrow:
            rounded = tensor.bfloat16()
            narrow[tensor.data_ptr()] = rounded if torch.equal(rounded.to(tensor.dtype), tensor) else tensor
    return {name: narrow.get(tensor.data_ptr(), tensor) for name, tensor in state.items()}


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKPOINTS)}; by default all")
    parser.add_argument("--cards", action="store_true", help="only write README.md again")
    parser.add_argument("--batch_size", type=int, default=8, help="files that are evaluated side by side")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - CHECKPOINTS.keys():
        parser.error(f"NAME is {unknown.pop()!r}; it must be one of {', '.join(CHECKPOINTS)}.")
    for name in arguments.names or CHECKPOINTS:
        if arguments.cards:
            (FOLDER / name / "README.md").write_text(renewed_card(name).content, encoding="utf-8")
        else:
            publish(name, train(name), arguments.batch_size)


if __name__ == "__main__":
    main()
