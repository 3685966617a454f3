"""Resident memory of a learner over a long stream; it does not grow.

python scripts/benchmark_online_memory.py                               # a million bytes, an update after each: hours
python scripts/benchmark_online_memory.py --bytes 50000 --stride 16     # a minute
"""

import itertools
import time

import torch
from benchmark_long_generation import resident_bytes
from benchmarking import build_model, option_parser
from transformers import set_seed

from hf_recurrent import Corpus, OnlineLearner
from hf_recurrent.learning_rules.rules import RULES
from papers.learner.drift import endless, pydoc_prose

SHARES = (10, 50, 100)  # per cent of the stream


def main() -> None:
    """Read Python's help topics repeatedly, and print the memory after some shares of the stream."""
    parser = option_parser(__doc__, threads=1)
    parser.add_argument("--model", default="memora-tiny", help="preset")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="number of bytes to read")
    parser.add_argument("--stride", type=int, default=1, help="T, bytes per update")
    parser.add_argument("--rule", default="rtrl", choices=RULES)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "rmsprop"])
    arguments = parser.parse_args()
    if arguments.bytes < 1000:
        parser.error(f"--bytes is {arguments.bytes}; it must be at least 1000.")
    torch.set_num_threads(arguments.threads)
    set_seed(0)
    learner = OnlineLearner(
        build_model(arguments.model),
        rule=arguments.rule,
        stride=arguments.stride,
        optimizer=arguments.optimizer,
        learning_rate=1e-3,
    )
    tokens = itertools.islice(endless(Corpus.from_documents(pydoc_prose()), 0), arguments.bytes)
    places = [arguments.bytes * share // 100 for share in SHARES]
    resident, begin = [], time.perf_counter()
    for share, place in zip(SHARES, places, strict=True):
        while learner.bytes_read < place:
            learner.read(bytes(itertools.islice(tokens, min(4096, place - learner.bytes_read))))
        resident.append(resident_bytes() / 2**20)
        print(
            f"{share:>3} %: {learner.bytes_read:>11,} bytes read, {resident[-1]:.1f} MiB resident, "
            f"{learner.record().bits_per_byte:.3f} bits per byte, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
    print(f"growth from 10 % to 100 %: {resident[-1] - resident[0]:+.1f} MiB")


if __name__ == "__main__":
    main()
