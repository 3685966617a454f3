#!/usr/bin/env python
"""Bytes per second of `generate()`, compared with one pass over the weights and the stock models of the same size.

The limit is the time of reading all weights once, or of the products with all streams where that takes longer, at the
bandwidth and the rate measured in the same run. Llama continues from a key-value cache of --position random keys and
values; the others have a state of constant size, so that the position does not matter. One CPU thread is measured in
CPU time. Models take turns; the median step of the best round counts.

    python scripts/benchmark_generation.py
    python scripts/benchmark_generation.py --rows s4 --families memora llama --streams 64 --device cuda
"""

import argparse
import itertools
import statistics

import benchmarking as bench
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_recurrent.stock_models.stock_model import cache_argument


class Stopwatch(StoppingCriteria):
    """Records the time of every step; never stops."""

    def __init__(self, device: torch.device):
        self.device, self.times = device, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs) -> torch.Tensor:
        self.times.append(bench.clock(self.device))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def filled_cache(model: PreTrainedModel, streams: int, position: int) -> DynamicCache:
    """A key-value cache with random numbers at `position` positions."""
    config, cache = model.config, DynamicCache(config=model.config)
    shape = (streams, config.num_key_value_heads, position, config.head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, *shape, device=model.device, dtype=model.dtype)
        cache.update(keys, values, layer)
    return cache


def tensor_bytes(thing: object) -> int:
    """Bytes of all tensors in a state or cache."""
    if isinstance(thing, torch.Tensor):
        return thing.nbytes
    if isinstance(thing, dict):
        return sum(map(tensor_bytes, thing.values()))
    if isinstance(thing, list | tuple):
        return sum(map(tensor_bytes, thing))
    return tensor_bytes(vars(thing)) if hasattr(thing, "layers") or hasattr(thing, "lazy_initialization") else 0


def generate(model: PreTrainedModel, options: argparse.Namespace) -> tuple[float, int]:
    """Median seconds per step, and bytes of state or cache per stream."""
    streams, watch, given, length = options.streams, Stopwatch(model.device), {}, 8
    if model.config.model_type == "llama":
        given[cache_argument(model)] = filled_cache(model, streams, options.position - 1)
        length = options.position
    prompt = torch.randint(1, 256, (streams, length), device=model.device)
    result = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=options.bytes,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        stopping_criteria=StoppingCriteriaList([watch]),
        **given,
    )
    size = tensor_bytes(result.get("cache", result.get("past_key_values"))) // streams  # by version
    steps = [end - begin for begin, end in itertools.pairwise(watch.times)]
    return statistics.median(steps), size


def measure_row(row: str, options: argparse.Namespace) -> list[list[str]]:
    models = {family: bench.build_model(f"{family}-{row}", options.device).eval() for family in options.families}
    seconds, sizes = {family: [] for family in models}, {}
    bandwidth = rate = 0.0
    for _ in range(options.rounds):
        bandwidth = max(bandwidth, bench.read_bandwidth(options.device, 1, options.bandwidth_bytes))
        rate = max(rate, bench.matrix_rate(options.device, 1))
        for family, model in models.items():
            step, sizes[family] = generate(model, options)
            seconds[family].append(step)
    first = min(seconds[options.families[0]])
    lines = []
    for family, model in models.items():
        best = min(seconds[family])
        products = 2 * options.streams * model.num_parameters()
        bound = max(sum(weight.nbytes for weight in model.parameters()) / bandwidth, products / rate)
        cells = (f"{family}-{row}", f"{model.num_parameters():,}", f"{options.streams / best:,.0f}")
        cells += (f"{best * 1e6:,.0f}", f"{bound * 1e6:,.0f}", f"{bound / best:.0%}", f"{best / first:.2f}")
        lines.append([*cells, f"{sizes[family] / 1024:,.1f}"])
    return lines


def main() -> None:
    parser = bench.family_parser(__doc__, rows=["s0", "s4"], streams=1, rounds=5, bandwidth_bytes=1 << 28)
    parser.add_argument("--bytes", type=int, default=32, help="new bytes per stream and round (default 32)")
    parser.add_argument("--position", type=int, default=4096, help="position at which Llama continues (default 4096)")
    options = bench.parse_and_set_up(parser)
    if options.bytes < 4:
        parser.error(f"--bytes is {options.bytes}; it must be at least 4.")
    lines = [line for row in options.rows for line in measure_row(row, options)]
    columns = ["model", "parameters", "bytes/s", "µs per step", "limit µs", "of the limit"]
    columns += [f"time / {options.families[0]}", "state KiB per stream"]
    ways = f"B {options.streams}, Llama from position {options.position:,}"
    title = f"generate(), {ways}; {bench.conditions(options.device)}"
    bench.report(title, columns, lines)


if __name__ == "__main__":
    main()
