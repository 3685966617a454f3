"""Compress and decompress random and adversarial inputs, and every file of a corpus; each has to come back.

python tests/faults/compress_inputs.py --cases 1000
python tests/faults/compress_inputs.py --cases 0 --model runs/memora-tiny-python --corpus FOLDER
"""

import argparse
import os
import random
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from hf_recurrent import config_from_preset
from hf_recurrent.compression.adaptive_predictor import AdaptiveSettings
from hf_recurrent.compression.files import compress, decompress

_TINY = {"hidden_size": 16, "state_size": 16, "num_hidden_layers": 1}
_LEARNING = AdaptiveSettings(stride=8, learning_rate=1e-2)


def new_model(scale: float = 1.0) -> torch.nn.Module:
    """A tiny model; with a large scale it is sure of everything."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **_TINY)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale)
    return model


def draw(generator: random.Random) -> tuple[str, bytes]:
    """A kind of input, and one of it."""
    size = generator.choice([0, 1, 2, 3, generator.randint(4, 60), generator.randint(60, 400)])
    kinds = {
        "random": generator.randbytes(size),
        "zeros": bytes(size),
        "one byte": bytes([generator.randrange(256)]) * size,
        "two bytes": bytes(generator.choices([0, 255], k=size)),
        "counting": bytes(number % 256 for number in range(size)),
        "text": (b"the quick brown fox %d\n" % generator.randrange(99) * (size // 20 + 1))[:size],
        "not UTF-8": (b"\xff\xfe\xc3\x28" * size)[:size],
        "an archive": compress(generator.randbytes(size % 40), new_model()),
    }
    kind = generator.choice(list(kinds))
    return kind, kinds[kind]


def check(name: str, data: bytes, generator: random.Random) -> str | None:
    """None, or a sentence about data that did not come back."""
    learns, scale, streams = generator.random() < 0.3, generator.choice([1, 1, 30]), generator.randint(1, 8)
    options = {"adaptive": _LEARNING} if learns else {"streams": streams}
    packed = compress(data, new_model(scale), mixes=generator.random() < 0.7, **options)
    if len(packed) > len(data) + 200 + 16 * (len(data) >> 16):
        return f"{name}: {len(data)} bytes became {len(packed)}"
    if decompress(packed, new_model(scale)) != data:
        return f"{name}: other bytes came back"
    return None


def main() -> None:
    """Run the cases of the command line; exit with 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a checkpoint, for --corpus")
    parser.add_argument("--corpus", type=Path, help="a folder, all files of which are compressed")
    parser.add_argument("--streams", type=int, default=16, help="for --corpus")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faults = []
    for case in tqdm(range(arguments.cases), disable=not sys.stderr.isatty()):
        generator = random.Random(f"{arguments.seed}/{case}")
        kind, data = draw(generator)
        if fault := check(f"case {case} (--seed {arguments.seed}), {kind}", data, generator):
            faults.append(fault)
    print(f"{arguments.cases} cases")
    if arguments.corpus is not None:
        model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
        files = sorted(path for path in arguments.corpus.rglob("*") if path.is_file())
        before = after = 0
        for path in tqdm(files, disable=not sys.stderr.isatty()):
            data = path.read_bytes()
            packed = compress(data, model, streams=arguments.streams)
            before, after = before + len(data), after + len(packed)
            if decompress(packed, model) != data:
                faults.append(f"{os.fspath(path)}: other bytes came back")
        print(f"{len(files)} files, {before:,} → {after:,} bytes")
    print("\n".join([*faults, f"{len(faults)} faults"]))
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
