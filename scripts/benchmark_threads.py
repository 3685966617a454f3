#!/usr/bin/env python
"""Bytes per second of several threads that generate on one model, next to one thread.

The limit is one pass over the weights for each byte, at the memory bandwidth that as many threads reach in the same
run, at most one for each core. Torch itself runs on one thread. One thread and several take turns; the best round of
each counts.

    python scripts/benchmark_threads.py
    python scripts/benchmark_threads.py --rows s0 s4 --callers 8
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from benchmarking import CPU, build_model, conditions, markdown_table, option_parser, parse_and_set_up
from transformers import PreTrainedModel


def seconds(function: Callable[[], object], callers: int) -> float:
    """Elapsed time until as many threads have each called the function once."""
    with ThreadPoolExecutor(callers) as threads:
        list(threads.map(time.sleep, [0.01] * callers))  # all threads have started
        begin = time.perf_counter()
        list(threads.map(lambda _: function(), range(callers)))
        return time.perf_counter() - begin


def generate(model: PreTrainedModel, count: int) -> None:
    prompt = torch.tensor([[65]])
    model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)


def measure(name: str, options: argparse.Namespace) -> list[list[str]]:
    """The table's lines of one model: one thread, then several."""
    model = build_model(name).eval()
    weights = sum(weight.nbytes for weight in model.parameters())
    numbers = torch.ones(options.bandwidth_bytes // 4)
    counts = (1, options.callers)
    readers = {count: min(count, os.cpu_count()) for count in counts}
    rates, bandwidths = dict.fromkeys(counts, 0.0), dict.fromkeys(counts, 0.0)
    generate(model, 2)
    for _ in range(options.rounds):
        for count in counts:
            bandwidth = readers[count] * numbers.nbytes / seconds(numbers.sum, readers[count])
            bandwidths[count] = max(bandwidths[count], bandwidth)
            rate = count * options.bytes / seconds(lambda: generate(model, options.bytes), count)
            rates[count] = max(rates[count], rate)
    lines = []
    for count in counts:
        limit = bandwidths[count] / weights
        cells = [name, str(count), f"{rates[count]:,.1f}", f"{rates[count] / rates[1]:.2f}"]
        lines.append([*cells, f"{bandwidths[count] / 1e9:.1f}", f"{limit:,.1f}", f"{rates[count] / limit:.0%}"])
    return lines


def main() -> None:
    """Print the table."""
    parser = option_parser(__doc__, rows=["s4"], rounds=5, bandwidth_bytes=1 << 28)
    parser.add_argument("--callers", type=int, default=4, help="threads that generate at once (default 4)")
    parser.add_argument("--bytes", type=int, default=30, help="new bytes of a thread in a round (default 30)")
    parser.set_defaults(threads=1)
    options = parse_and_set_up(parser)
    lines = [line for row in options.rows for line in measure(f"memora-{row}", options)]
    columns = ["model", "threads", "bytes/s", "of one thread's", "GB/s", "limit bytes/s", "of the limit"]
    print(f"{conditions(CPU)}\n\n{markdown_table(columns, lines)}")


if __name__ == "__main__":
    main()
