#!/usr/bin/env python
"""Bits per byte of a user's second document, in a new session and in one that has read the first document.

    python scripts/benchmark_second_documents.py runs/memora-tiny-python 'my_project/*.py'
    python scripts/benchmark_second_documents.py runs/memora-tiny-python 'logs/*.log' --window 65536 --rows 256

Files of a directory are paired at random; of a larger file, the first --bytes count. With a count memory the state of
a stream learns the text that it reads: a session adapts, no weights change, and no other session knows.
"""

import argparse
import math
import random
from collections import defaultdict
from glob import glob
from pathlib import Path

import benchmarking as bench
import torch
from transformers import AutoModelForCausalLM

import hf_recurrent  # registers the models


def pairs_of_files(patterns: list[str], most_bytes: int, seed: int) -> list[tuple[bytes, bytes]]:
    """Pairs of the contents of files that lie in one directory."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted({Path(name) for pattern in patterns for name in glob(pattern, recursive=True)}):
        folders[path.parent].append(path)
    generator, pairs = random.Random(seed), []
    for paths in folders.values():
        generator.shuffle(paths)
        texts = [path.read_bytes()[:most_bytes] for path in paths]
        pairs += [
            (first, second) for first, second in zip(texts[::2], texts[1::2], strict=False) if min(first, second)
        ]
    return pairs


def measure(model: torch.nn.Module, pairs: list[tuple[bytes, bytes]]) -> list[float]:
    """Bits per byte of the second documents from a fresh state, and after the first ones."""
    totals, count = [0.0, 0.0], 0
    for texts in pairs:
        first, second = (torch.tensor([list(text)]) for text in texts)
        with torch.inference_mode():
            after = model.token_losses(first[:, :-1], first[:, 1:]).state
            for number, state in enumerate((None, after)):
                totals[number] += float(model.token_losses(second[:, :-1], second[:, 1:], state).nats.sum())
        count += second.shape[1] - 1
    return [total / math.log(2) / count for total in totals]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="directory of a model with a count memory")
    parser.add_argument("files", nargs="+", metavar="PATTERN")
    parser.add_argument("--bytes", type=int, default=10_000, help="of each file at most (default 10000)")
    parser.add_argument("--window", type=int, help="bytes of the short-term memory (default: the model's)")
    parser.add_argument("--rows", type=int, help="rows of weights that adapt (default: the model's)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pairs = pairs_of_files(arguments.files, arguments.bytes, arguments.seed)
    if not pairs:
        parser.error(f"PATTERN {' '.join(arguments.files)} has no two files in one directory")
    sizes = {"count_memory_window": arguments.window, "count_memory_rows": arguments.rows}
    given = {name: value for name, value in sizes.items() if value is not None}
    model = AutoModelForCausalLM.from_pretrained(arguments.model, **given).eval()
    state = sum(tensor.nbytes for tensor in model.init_state(1).values())
    fresh, after = measure(model, pairs)
    columns = ["pairs", "state bytes", "second document alone", "after the first one"]
    title = f"Bits per byte of second documents, hf_recurrent {hf_recurrent.__version__}"
    bench.report(title, columns, [[f"{len(pairs)}", f"{state:,}", f"{fresh:.3f}", f"{after:.3f}"]])


if __name__ == "__main__":
    main()
