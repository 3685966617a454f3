"""Train the released models and write each one's repository, ready to upload; then release them.

    python scripts/train_released_models.py --minutes 20             # a piece; the same command continues
    python scripts/train_released_models.py lru-tiny-python          # one model
    python scripts/train_released_models.py --release you            # list what would be uploaded to you/NAME
    python scripts/train_released_models.py --release you --upload   # upload it; log in with `hf auth login` first
    python scripts/train_released_models.py --cards --output_dir model_cards   # only the cards, from provenance.json

The run of NAME is in runs/NAME; arguments after `--` go to `hf-recurrent pretrain`. Matrices are rounded to bfloat16
and stored so; the card has the numbers of the rounded weights on whole held-out files. Loaded, they are float32 unless
another `dtype` is asked for.
"""

import argparse
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_recurrent import ByteTokenizer
from hf_recurrent.checkpoints.fingerprints import weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import find_provenance, read_provenance, remember_provenance
from hf_recurrent.checkpoints.records import Data, Provenance, Sample
from hf_recurrent.cli.data_arguments import DataArguments, load_evaluation_source
from hf_recurrent.cli.push_to_hub import main as push_to_hub
from hf_recurrent.data.episode_source import EvaluationShare
from hf_recurrent.evaluation.compressors import compressed_bits_per_byte
from hf_recurrent.evaluation.samples import generate_samples
from hf_recurrent.export.weight_types import round_weights
from hf_recurrent.hub.checkpoint import narrow_weights, save_checkpoint_for_hub
from hf_recurrent.hub.model_card import Statements, create_model_card, unnamed_repository

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 30_000_000  # of the weights of a released model
ROUNDED = "After training, matrices were rounded to bfloat16."
_TINY = "--recipe default --train_bytes 8e6 --block_size 128"
_COUNTS = "count_memory_slots=16384 count_memory_text=1048576"
# Repository → arguments of `hf-recurrent pretrain`. Tables and counts are smaller than in the recipes: see MOST_BYTES.
CHECKPOINTS = {
    "memora-tiny-python": "--recipe default --accounts false --config_overrides ngram_orders=[2,3,4,5,6] "
    "ngram_rows=8192 count_memory_slots=32768 count_memory_text=2097152",
    "memora-s0-python": "--recipe memora-s0 --config_overrides norm_eps=1e-6 --accounts false",
    "hawk-s0-python": "--recipe hawk-s0 --train_bytes 20e6 --bf16_products true",
    "hawk-tiny-python": f"{_TINY} --model hawk-tiny",
    "lru-tiny-python": f"{_TINY} --model lru-tiny",
    "mgrade-tiny-python": f"{_TINY} --model mgrade-tiny",
    "mgrade-counts-python": f"--recipe default --model mgrade-tiny --accounts false --config_overrides {_COUNTS}",
    "smt-rnn-tiny-python": "--recipe smt --max_steps 4000 --dmt_steps 400",
}


def train(name: str, corpus: str, further: list[str], deadline: float) -> Path | None:
    """Train, or continue, until `deadline`; returns the directory of the run, None if it has not ended."""
    run = Path("runs", name)
    if (run / "_recipe.yaml").is_file():  # written last
        return run
    arguments = [*shlex.split(CHECKPOINTS[name]), "--corpus", corpus, *further]
    arguments += ["--output_dir", str(run), "--resume_from_checkpoint", "true"]
    process = subprocess.Popen([sys.executable, str(ROOT / "scripts" / "pretrain.py"), *arguments])
    try:
        status = process.wait(max(deadline - time.monotonic(), 0) if deadline < float("inf") else None)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it saves a checkpoint
        status = process.wait()
    if status not in (0, 128 + signal.SIGTERM, -signal.SIGTERM):
        raise SystemExit(f"{name}: training ended with status {status}.")
    return run if (run / "_recipe.yaml").is_file() else None


def publish(name: str, run: Path, corpus: str, folder: Path) -> None:
    """Round, measure and describe the weights of a run, and write the repository."""
    model = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32).eval()
    tokenizer = ByteTokenizer.from_pretrained(run)
    provenance = find_provenance(model)
    round_weights(model, "bfloat16")
    source = load_evaluation_source(DataArguments(corpus=[corpus]), tokenizer, "validation")
    share = EvaluationShare(batch_size=8, progress=True)
    metrics = source.evaluation_metrics(source.evaluate(model, share))
    weights = provenance.weights = weights_fingerprint(model)
    settings = {"block_size": share.block_size, "state_carried": True}
    provenance.results = []
    provenance.add_metrics(weights, Data.of(source), metrics, settings)
    prompt = "class Path"
    text = generate_samples(model, tokenizer, [prompt], 400, temperature=0.7)[0]
    provenance.sample = Sample(prompt, text, weights, 0.7)
    provenance.gaps.append(ROUNDED)
    remember_provenance(model, provenance)
    comparisons = {f"{name}, each file alone": value for name, value in compressed_bits_per_byte(source).items()}
    write(model, tokenizer, folder, create_card(model, provenance, name, comparisons))


def create_card(model: PreTrainedModel, provenance: Provenance, name: str, comparisons: dict[str, float]) -> ModelCard:
    statements = Statements(repo_id=unnamed_repository(name), license="apache-2.0", comparisons=comparisons)
    return create_model_card(model, provenance, statements, curve=True)


def renewed_card(folder: Path) -> ModelCard:
    """The card of a repository from its record; the bits per byte of compressors are copied from the present card."""
    rows = re.findall(r"^\| (.*, each file alone) \| ([\d.]+) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    comparisons = {method: float(value) for method, value in rows}
    model = AutoModelForCausalLM.from_pretrained(folder)
    return create_card(model, read_provenance(folder), folder.name, comparisons)


def write(model: PreTrainedModel, tokenizer: ByteTokenizer, folder: Path, card: ModelCard | str) -> None:
    """Replace the files of a repository, without code: saving and pushing the model add it."""
    weights = narrow_weights(model)
    different = {tensor.data_ptr(): tensor for tensor in weights.values()}.values()  # tied ones once
    if (size := sum(tensor.nbytes for tensor in different)) > MOST_BYTES:
        raise SystemExit(
            f"{folder.name}: its weights take {size:,} bytes; a released model has at most {MOST_BYTES:,}."
        )
    save_checkpoint_for_hub(model, tokenizer, folder, card, state_dict=weights)
    for file in folder.glob("*.py"):
        file.unlink()
    for path in (folder / "config.json", folder / "tokenizer_config.json"):
        fields = json.loads(path.read_text(encoding="utf-8"))
        del fields["auto_map"]
        path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def release(folders: list[Path], owner: str, *, upload: bool) -> None:
    """Upload the repositories as `owner`/NAME, or list their files and cards."""
    for folder in folders:
        push_to_hub([str(folder), f"{owner}/{folder.name}", *["--dry_run"] * (not upload)])
    if not upload:
        print("Nothing was uploaded; --upload does it.")


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKPOINTS)}; by default all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="maximum minutes of training")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/released"), help="directory of the repositories")
    parser.add_argument("--corpus", default="python", help="corpus to train and measure on")
    parser.add_argument("--cards", action="store_true", help="only write README.md again")
    parser.add_argument("--release", metavar="OWNER", help="upload the written repositories as OWNER/NAME: a dry run")
    parser.add_argument("--upload", action="store_true", help="with --release: no dry run")
    words = [*sys.argv[1:], "--"]
    end = words.index("--")
    arguments, further = parser.parse_args(words[:end]), words[end + 1 : -1]
    if unknown := set(arguments.names) - CHECKPOINTS.keys():
        parser.error(f"NAME is {unknown.pop()!r}; it must be one of {', '.join(CHECKPOINTS)}.")
    if arguments.upload and not arguments.release:
        parser.error("--upload needs --release OWNER.")
    if further and (arguments.cards or arguments.release):
        parser.error(f"-- {further[0]} is for training; it cannot be combined with --cards and --release.")
    return arguments, further


def main() -> None:
    arguments, further = _parse()
    deadline = time.monotonic() + 60 * arguments.minutes
    folders = [arguments.output_dir / name for name in arguments.names or CHECKPOINTS]
    written = [folder for folder in folders if (folder / "README.md").is_file()]
    if arguments.cards or arguments.release:
        if missing := sorted(set(folders) - set(written)) if arguments.names else not written and folders:
            raise SystemExit(f"{missing[0]}: directory not found; run this script without --cards or --release first.")
        for folder in written if arguments.cards else ():
            (folder / "README.md").write_text(renewed_card(folder).content, encoding="utf-8")
        if arguments.release:
            release(written, arguments.release, upload=arguments.upload)
        return
    for folder in folders:
        if folder in written:
            print(f"{folder}: written before.")
        elif run := train(folder.name, arguments.corpus, further, deadline):
            publish(folder.name, run, arguments.corpus, folder)
            print(f"{folder}: written.")
        else:
            print(f"{folder.name}: stopped after {arguments.minutes:g} minutes; the same command continues.")
        if time.monotonic() > deadline:
            break


if __name__ == "__main__":
    main()
