"""Damage every file of a learner's checkpoint and of a packed corpus in every way, and use them.

    python tests/faults/damage_learner.py --cases 300 --seed 0

A damaged checkpoint has to be refused with one sentence that names the file, and nothing may change on the disk; a
damaged corpus has to be packed again. An attack also adjusts the checksums, so that only the content is wrong: a value
of another type, or a tensor that is missing, unknown or of another shape, has to be refused; other values may be used,
but not crash, hang, fill the memory or show a traceback.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from damages import Damage, accidents, attacks
from forked import Outcome, run_forked
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from hf_recurrent.checkpoints.manifest import MANIFEST_FILE, write_manifest
from hf_recurrent.data.packing import METADATA, OFFSETS, TOKENS, content_fingerprint

SETTINGS = ["--stride", "8", "--block_size", "16", "--learning_rate", "1e-2", "--window", "30", "--quiet"]
LOG = b"".join(b"line %d of the log\n" % (number * 37 % 101) for number in range(8))
LEARN_ERROR = "hf-recurrent learn: error: "
# The run of a learner, and a cache of packed corpora.
RUN, CACHE = "run", "cache"
REFUSED, REBUILT, ANYTHING = "refused", "the same result", "refused or used"


@dataclass
class Case:
    """One damage of one file, and the outcome that it must have."""

    place: str
    file: str
    name: str
    damage: Damage
    outcome: str
    adjust: Callable[[Path], None] | None = None

    def __str__(self) -> str:
        return f"{self.place}/{self.file}: {self.name}"


# ---- The files ----


def prepare() -> None:
    """A run of a learner with a checkpoint in the middle of its log, another one, and a packed corpus."""
    from transformers import AutoModelForCausalLM, set_seed

    from hf_recurrent import ByteTokenizer, config_from_preset
    from hf_recurrent.cli.learn import main

    set_seed(0)
    sizes = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **sizes)).save_pretrained("model")
    ByteTokenizer().save_pretrained("model")
    for output, size in (("other", 83), (RUN, 77)):
        Path("log.txt").write_bytes(LOG[:size])
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            main(["model", "--source", "log.txt", "--output_dir", output, *SETTINGS])
    for path in Path(RUN).iterdir():  # the model that was published would hide a run that begins anew
        if path.is_file() and path.name != "records.jsonl":
            path.unlink()
    Path("log.txt").write_bytes(LOG)
    texts = [{"text": "a story"}, {"text": "another one"}, {"text": "the end"}]
    Path("stories.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    read_corpus(CACHE)


def read_corpus(cache: str) -> str:
    """The digest of all that a corpus holds."""
    from hf_recurrent import load_corpus

    corpus = load_corpus("stories.jsonl", cache_dir=cache)
    found = hashlib.sha256(f"{corpus.vocab_size} {corpus.end_token_id}".encode())
    for episode in corpus:
        found.update(episode.tobytes() + b"\n")
    return found.hexdigest()


def use(place: str, directory: str) -> Outcome:
    """Resume a run, or read a corpus, in a child; the output of a corpus ends with its digest."""
    if place == CACHE:
        return run_forked(lambda: print(read_corpus(directory)))
    from hf_recurrent.cli.learn import main

    return run_forked(lambda: main(["model", "--source", "log.txt", "--output_dir", directory, *SETTINGS, "--resume"]))


def result(place: str, directory: str, outcome: Outcome) -> str:
    """Results with undamaged files."""
    if place == CACHE:
        return outcome.out.strip().rpartition("\n")[2]
    weights = sorted(Path(directory).glob("*.safetensors"))
    return " ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in weights)


# ---- The damages ----


def swaps(file: Path) -> Iterator[tuple[str, Damage]]:
    """The file of the other checkpoint."""
    (other,) = Path("other").glob(f"checkpoint-*/{file.name}")
    if other.read_bytes() != file.read_bytes():
        yield "of another checkpoint", lambda path: shutil.copy(other, path)


def wrong_types(file: Path, draw: random.Random) -> Iterator[tuple[str, Damage]]:
    """Values of learner.json that are missing or of another type, without end."""
    content = json.loads(file.read_text())
    places: list[tuple] = []

    def visit(value: object, path: tuple) -> None:
        for key, item in value.items():
            if path[:1] != ("metadata",) and key != "format":
                places.append((*path, key))
            if isinstance(item, dict) and key not in ("metadata", "optimizer"):
                visit(item, (*path, key))

    visit(content, ())

    def change(path: Path, place: tuple, value: object) -> None:
        changed = json.loads(path.read_text())
        part = changed
        for key in place[:-1]:
            part = part[key]
        if value is KeyError:
            del part[place[-1]]
        else:
            part[place[-1]] = value
        path.write_text(json.dumps(changed))

    while True:
        place = draw.choice(places)
        value = draw.choice(
            [KeyError, "text", -1, 1e400, float("nan"), [[]], {"": 0}, 2**64, {"__tensor__": "nowhere"}]
        )
        if not (place == ("settings", "max_grad_norm") and value in (2**64, 1e400)):  # they mean no clipping
            yield f"{'.'.join(place)} is {value}", lambda path, place=place, value=value: change(path, place, value)


def wrong_tensors(file: Path, draw: random.Random) -> Iterator[tuple[str, Damage]]:
    """Tensors that are missing, unknown, or of another shape or type, without end."""
    names = sorted(load_file(file))

    def change(path: Path, name: str, how: str) -> None:
        tensors = load_file(path)
        tensor = tensors.pop(name)
        if how == "unknown":
            tensors |= {name: tensor, f"{name}.another": torch.zeros(3)}
        elif how == "of another shape":
            tensors[name] = torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]]).contiguous()
        elif how == "of integers":
            tensors[name] = torch.zeros(tensor.shape, dtype=torch.int32)
        save_file(tensors, path, {"format": "pt"})

    while True:
        name = draw.choice(names)
        how = draw.choice(["missing", "unknown", "of another shape", "of integers"])
        if not (how == "of integers" and name.endswith(".step")):
            yield f"{name} is {how}", lambda path, name=name, how=how: change(path, name, how)


def sign_checkpoint(path: Path) -> None:
    """Write the manifest of a damaged checkpoint anew."""
    write_manifest(path.parent)


def sign_corpus(path: Path) -> None:
    """Write the checksum of a damaged corpus anew, as far as there is enough left to compute it."""
    import numpy as np

    with contextlib.suppress(Exception):
        metadata = json.loads((path.parent / METADATA).read_text())
        offsets = np.load(path.parent / OFFSETS, allow_pickle=False)
        metadata["fingerprint"] = content_fingerprint(
            path.parent / TOKENS, offsets, metadata["vocab_size"], metadata["end_token_id"]
        )
        (path.parent / METADATA).write_text(json.dumps(metadata))


def cases(draw: random.Random) -> Iterator[Case]:
    """Cases without end: every file in turn."""
    makers: list[tuple[str, str, Iterator, str, Callable | None, int]] = []
    for path in sorted(path for path in Path(RUN).rglob("*") if path.is_file()):
        name = path.relative_to(RUN).as_posix()
        if path.name == "records.jsonl":
            makers.append((RUN, name, accidents(path, draw), ANYTHING, None, 1))
            continue
        makers.append((RUN, name, itertools.chain(swaps(path), accidents(path, draw)), REFUSED, None, 2))
        if path.name != MANIFEST_FILE:
            makers.append((RUN, name, attacks(path, draw), ANYTHING, sign_checkpoint, 1))
        if path.name == "learner.json":
            makers.append((RUN, name, wrong_types(path, draw), REFUSED, sign_checkpoint, 2))
        if path.suffix == ".safetensors":
            makers.append((RUN, name, wrong_tensors(path, draw), REFUSED, sign_checkpoint, 2))
    for path in sorted(Path(CACHE).rglob("*.*")):
        if path.is_file() and path.suffix != ".lock":
            name = path.relative_to(CACHE).as_posix()
            makers.append((CACHE, name, accidents(path, draw), REBUILT, None, 1))
            makers.append((CACHE, name, accidents(path, draw), ANYTHING, sign_corpus, 1))
            makers.append((CACHE, name, attacks(path, draw), ANYTHING, sign_corpus, 1))
    while True:
        for place, name, damages, outcome, adjust, times in makers:
            for words, damage in itertools.islice(damages, times):
                yield Case(place, name, words, damage, outcome, adjust)


# ---- The outcomes ----


def fault(case: Case, outcome: Outcome, is_same: bool, is_unchanged: bool) -> str | None:
    """Why the outcome of a case is not acceptable, or None."""
    if outcome.timed_out:
        return "timed out"
    if outcome.crashed:
        return f"crashed with signal {-outcome.status}"
    if outcome.has_traceback:
        return "traceback"
    if outcome.status == 0:
        return None if is_same or case.outcome == ANYTHING else "used silently"
    if case.outcome == REBUILT:
        return "not packed again"
    sentence = outcome.err.rpartition(LEARN_ERROR)[2]
    if LEARN_ERROR not in outcome.err or sentence.count("\n") != 1:
        return "not one sentence"
    if outcome.status == 2 and not is_unchanged:
        return "refused, but files have changed"
    if case.outcome == REFUSED and outcome.status != 2:
        return f"refused with status {outcome.status}"
    name = Path(case.file).name
    if case.outcome == REFUSED and case.adjust is None and name != MANIFEST_FILE and f"`{name}`" not in sentence:
        return "the file is not named"
    return None


def snapshot(directory: str) -> dict[str, bytes | None]:
    """All files of a directory."""
    return {
        os.fspath(path): path.read_bytes() if path.is_file() else None for path in sorted(Path(directory).rglob("*"))
    }


def run(number: int, seed: int) -> Counter:
    """Run some cases; the counter has the outcomes, and each fault under its own words."""
    count, expected = Counter(), {}
    for place in (RUN, CACHE):
        shutil.copytree(place, "whole")
        outcome = use(place, "whole")
        if outcome.status:
            raise RuntimeError(f"{place}: undamaged files cannot be used: {outcome.err}")
        expected[place] = result(place, "whole", outcome)
        shutil.rmtree("whole")
    for case in tqdm(itertools.islice(cases(random.Random(seed)), number), total=number, unit="case"):
        shutil.copytree(case.place, "damaged")
        path = Path("damaged", case.file)
        case.damage(path)
        if case.adjust is not None:
            case.adjust(path)
        before = snapshot("damaged")
        outcome = use(case.place, "damaged")
        is_same = outcome.status == 0 and result(case.place, "damaged", outcome) == expected[case.place]
        found = fault(case, outcome, is_same, snapshot("damaged") == before)
        shutil.rmtree("damaged")
        count["cases"] += 1
        count["attacks" if case.adjust else "accidents"] += 1
        words = "refused" if outcome.status else "the same result" if is_same else "used the content of an attack"
        count[f"faults: {found}" if found else words] += 1
        if found:
            print(f"{case}: {found}\n{outcome.err[-1500:]}")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = os.path.join(folder, "home")
        os.chdir(folder)
        prepare()
        count = run(options.cases, options.seed)
        os.chdir("/")
    for name, value in count.items():
        print(f"{value:6,}  {name}")
    sys.exit(any(name.startswith("faults") for name in count))


if __name__ == "__main__":
    main()
