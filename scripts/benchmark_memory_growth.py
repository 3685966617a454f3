"""Memory over a long stream: of one call of `generate()`, or of a learner; neither grows.

    python scripts/benchmark_memory_growth.py generate --model runs/memora-tiny-python
    python scripts/benchmark_memory_growth.py learn --bytes 1000000 --stride 16

`generate` also compares the time of a byte at the beginning and at the end; `learn` reads Python's help topics
repeatedly. Both print the resident memory after 10, 50 and 100 per cent of the bytes.
"""

import argparse
import itertools
import statistics
import time

import psutil
import torch
from benchmarking import build_model, option_parser
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.generation import BaseStreamer

from hf_recurrent import Corpus, OnlineLearner, preset_names
from hf_recurrent.learning_rules.rules import RULES
from papers.learner.drift import endless, pydoc_prose

_WINDOW = 1000


class Progress(BaseStreamer):
    """Prints the resident memory after some shares of the bytes, and records CPU time after every byte."""

    def __init__(self, total: int):
        self.places = {total * share // 100: share for share in (10, 50, 100)}
        self.seconds: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.seconds.append(time.process_time())
        self.note(len(self.seconds) - 1)  # the first call has the prompt

    def end(self) -> None:
        pass

    def note(self, count: int, more: str = "") -> None:
        """Print a line if `count` bytes are one of the shares."""
        if count in self.places:
            resident = psutil.Process().memory_info().rss / 2**20
            print(f"{self.places[count]:>3} %: {count:>11,} bytes, {resident:.1f} MiB resident{more}", flush=True)


def generate(model: PreTrainedModel, options: argparse.Namespace) -> None:
    watch, prompt = Progress(options.bytes), torch.tensor([list(b"def ")])
    model.eval().generate(
        prompt, do_sample=True, max_new_tokens=options.bytes, eos_token_id=None, pad_token_id=0, streamer=watch
    )
    steps = [end - begin for begin, end in itertools.pairwise(watch.seconds[1:])]
    # The first thousand bytes warm up caches.
    first, last = (statistics.median(part) * 1e6 for part in (steps[_WINDOW : 2 * _WINDOW], steps[-_WINDOW:]))
    ratio = last / first
    print(f"median CPU time per byte: {first:.0f} µs at the beginning, {last:.0f} µs at the end, ratio {ratio:.3f}")


def learn(model: PreTrainedModel, options: argparse.Namespace) -> None:
    watch = Progress(options.bytes)
    learner = OnlineLearner(model, rule=options.rule, stride=options.stride, learning_rate=1e-3)
    tokens = itertools.islice(endless(Corpus.from_documents(pydoc_prose()), 0), options.bytes)
    for place in watch.places:
        while learner.bytes_read < place:
            learner.read(bytes(itertools.islice(tokens, min(4096, place - learner.bytes_read))))
        watch.note(place, f", {learner.record().bits_per_byte:.3f} bits per byte, {time.process_time():.0f} s")


def main() -> None:
    parser = option_parser(__doc__, threads=1)
    parser.add_argument("what", choices=["generate", "learn"])
    parser.add_argument("--model", default="memora-tiny", help="preset, directory or owner/name on the Hub")
    parser.add_argument("--bytes", type=int, default=100_000, help="number of bytes")
    parser.add_argument("--stride", type=int, default=1, help="T, bytes per update of the learner")
    parser.add_argument("--rule", default="rtrl", choices=RULES)
    options = parser.parse_args()
    if options.bytes < 3 * _WINDOW:
        parser.error(f"--bytes is {options.bytes}; it must be at least {3 * _WINDOW}.")
    torch.set_num_threads(options.threads)
    set_seed(0)
    is_preset = options.model in preset_names()
    model = build_model(options.model) if is_preset else AutoModelForCausalLM.from_pretrained(options.model)
    {"generate": generate, "learn": learn}[options.what](model, options)


if __name__ == "__main__":
    main()
