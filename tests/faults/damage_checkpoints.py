"""Damage every file of training checkpoints in every way, and resume from them with `hf-recurrent pretrain`.

    python tests/faults/damage_checkpoints.py --cases 600 --seed 0

A damaged checkpoint has to be refused with one sentence that names the file. An attack also adjusts the manifest, so
that only the content is wrong: it may be refused or used, but not crash, hang, fill the memory or show a traceback.
"""

import argparse
import contextlib
import hashlib
import itertools
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from damages import Damage, accidents, attacks, copy_with
from forked import Outcome, run_forked
from tqdm import tqdm

from hf_recurrent.checkpoints.manifest import MANIFEST_FILE, read_manifest, write_manifest

COMMON = [
    "--use_cpu", "--max_steps", "6", "--save_steps", "4", "--disable_tqdm", "true", "--report_to", "none",
    "--sample_every", "0", "--sample_bytes", "4", "--per_device_train_batch_size", "2",
    "--per_device_eval_batch_size", "2", "--validation_fraction", "0.2",
]  # fmt: skip
_TINY = ["hidden_size=16", "num_hidden_layers=1"]
# The trainers, each with what its checkpoints hold in addition: carried states, sensitivities, a teacher.
KINDS = {
    "bptt": ["--block_size", "16", "--config_overrides", *_TINY, "state_size=16"],
    "rtrl": ["--method", "rtrl", "--block_size", "4", "--config_overrides", *_TINY, "state_size=16"],
    "smt": [
        "--method", "smt", "--dmt_steps", "0", "--block_size", "16", "--context_length", "8", "--future_length", "4",
        "--eval_windows", "2",
        "--config_overrides", *_TINY, "num_attention_heads=2", "num_memory_tokens=2",
    ],
}  # fmt: skip


@dataclass
class Case:
    """One damage of one file of a checkpoint."""

    kind: str
    file: str
    name: str
    damage: Damage
    is_attack: bool

    def __str__(self) -> str:
        return f"{self.kind}: {'attack' if self.is_attack else 'accident'} on {self.file}: {self.name}"


def resume(kind: str, checkpoint: Path, output_dir: Path, corpus: Path) -> Outcome:
    """Resume a run from a checkpoint, in a child."""
    from hf_recurrent.cli.pretrain import main

    arguments = ["--corpus", str(corpus), *COMMON, *KINDS[kind], "--output_dir", str(output_dir)]
    return run_forked(lambda: main([*arguments, "--resume_from_checkpoint", str(checkpoint)]))


def prepare(folder: Path, kinds: list[str]) -> dict[str, Path]:
    """Train one run of each of the kinds, and return their checkpoints."""
    from hf_recurrent.cli.pretrain import main

    corpus = folder / "notes"
    corpus.mkdir()
    for number in range(6):
        (corpus / f"{number}.txt").write_text("All work and no play makes Jack a dull boy.\n" * (number + 1))
    checkpoints = {}
    for kind in kinds:
        arguments, output_dir = KINDS[kind], folder / kind
        with contextlib.redirect_stdout(open(os.devnull, "w")), contextlib.redirect_stderr(open(os.devnull, "w")):
            main(["--corpus", str(corpus), *COMMON, *arguments, "--output_dir", str(output_dir)])
        checkpoints[kind] = output_dir / "checkpoint-4"
    return checkpoints


def cases(checkpoints: dict[str, Path], draw: random.Random) -> Iterator[Case]:
    """Cases without end: every file of every kind in turn, with two accidents to one attack."""
    makers = []
    for kind, checkpoint in checkpoints.items():
        for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
            name = path.relative_to(checkpoint).as_posix()
            makers += [(kind, name, False, accidents(path, draw), 2), (kind, name, True, attacks(path, draw), 1)]
    while True:
        for kind, name, is_attack, damages, times in makers:
            for words, damage in itertools.islice(damages, times):
                yield Case(kind, name, words, damage, is_attack)


def fault(case: Case, outcome: Outcome, damaged: Path, same_result: bool) -> str | None:
    """Why the outcome of a case is not acceptable, or None."""
    if outcome.timed_out:
        return "timed out"
    if outcome.crashed:
        return f"crashed with signal {-outcome.status}"
    if outcome.has_traceback:
        return "traceback"
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    if outcome.status == 0:
        return None if case.is_attack or same_result else "used silently"
    if not lines or not lines[-1].startswith("hf-recurrent pretrain: error: ") or len(lines) > 2:
        return "not one sentence"
    if not case.is_attack and damaged.name not in lines[-1] and MANIFEST_FILE not in lines[-1]:
        return "the file is not named"
    return None


def digest(directory: Path) -> str:
    """Hash of the trained weights."""
    found = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def run(number: int, seed: int, folder: Path, kinds: list[str]) -> Counter:
    """Run some cases; the counter has the outcomes, and each fault under its own words."""
    checkpoints = prepare(folder, kinds)
    corpus, count = folder / "notes", Counter()
    expected = {}
    for kind, checkpoint in checkpoints.items():
        whole = resume(kind, checkpoint, folder / f"whole-{kind}", corpus)
        if whole.status:
            raise RuntimeError(f"{kind}: resuming an undamaged checkpoint fails: {whole.err}")
        expected[kind] = digest(folder / f"whole-{kind}")
    chosen = itertools.islice(cases(checkpoints, random.Random(seed)), number)
    for case in tqdm(chosen, total=number, unit="case"):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            copy, output_dir = Path(place, "checkpoint-4"), Path(place, "out")
            damaged = copy_with(checkpoints[case.kind], copy, case.file, case.damage)
            if case.is_attack and case.file != MANIFEST_FILE:
                write_manifest(copy, num_processes=read_manifest(checkpoints[case.kind])["num_processes"])
            outcome = resume(case.kind, copy, output_dir, corpus)
            found = fault(case, outcome, damaged, digest(output_dir) == expected[case.kind])
        count["cases"] += 1
        count["accidents" if not case.is_attack else "attacks"] += 1
        count[
            f"faults: {found}" if found else "refused" if outcome.status else "same result or content of an attack"
        ] += 1
        if found:
            print(f"{case}: {found}\n{outcome.err[-1500:]}")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = os.path.join(folder, "home")
        count = run(options.cases, options.seed, Path(folder), options.kinds)
    for name, value in count.items():
        print(f"{value:6,}  {name}")
    sys.exit(any(name.startswith("faults") for name in count))


if __name__ == "__main__":
    main()
