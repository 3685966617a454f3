#!/usr/bin/env python
"""Bytes per second of `generate()`, compared with one pass over the weights and the stock models of the same size.

The limit is the time of reading all weights once, or of the products with all streams where that takes longer, at the
bandwidth and the rate measured in the same run. Llama continues from a key-value cache of --position random keys and
values; the others have a state of constant size, so that the position does not matter. One CPU thread is measured in
CPU time. Models take turns; the median step of the best round counts.

`--only` chooses other tables, of single steps without the loop of `generate()`:

    runtimes    the compiled step beside exported programs of the same model: torch.export, AOTInductor, onnxruntime,
                ExecuTorch. --exports keeps the programs between runs; --prepare only writes them
    families    `forward` and the compiled step of every family, and of every unit in the block of Memora
    weights     the compiled step with float32, bfloat16 and int8 weights
    streams     64 streams at once
    first       from `from_pretrained` to the first byte, and the bytes after it

    python scripts/benchmark_generation.py
    python scripts/benchmark_generation.py --rows s4 --families memora llama --streams 64 --device cuda
    python scripts/benchmark_generation.py --only runtimes --models memora-s0 lru-tiny --exports /tmp/exports
    python scripts/benchmark_generation.py --only families --models hawk-s4 memora-s0+gru
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import benchmarking as bench
import step_peers as peers
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS

_UNITS = [
    f"memora-{row}+{unit}" for row in ("tiny", "s4") for unit in RECURRENT_UNITS if unit not in ("glru", "rg_lru")
]
_FAMILIES = ["memora-tiny", "memora-s4", "hawk-tiny", "hawk-s4", "mgrade-tiny", "lru-tiny", "lru-copy"]
_FAMILIES += [f"smt-rnn-{row}{backbone}" for row in ("tiny", "paper") for backbone in ("", "+mlp", "+gru")]
# Table → its models.
_MODELS = {
    "runtimes": ["memora-s0", "memora-s4", "hawk-s4", "mgrade-tiny", "lru-tiny"],
    "families": _FAMILIES + _UNITS,
    "weights": ["memora-s0", "memora-s4"],
    "streams": ["memora-s0", "hawk-s0", "memora-s4"],
    "first": ["memora-s0", "memora-s4"],
}
# Seconds of one measurement, for steps of microseconds.
_SHORTEST = 0.01


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
        given["past_key_values"] = filled_cache(model, streams, options.position - 1)
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
    size = tensor_bytes(result.past_key_values) // streams
    steps = [end - begin for begin, end in itertools.pairwise(watch.times)]
    return statistics.median(steps), size


def measure_row(row: str, options: argparse.Namespace) -> tuple[list[list[str]], dict[str, float], float]:
    """Lines of the table for one size, bytes per second of each model, and the limit of the first."""
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
    lines, rates, limits = [], {}, []
    for family, model in models.items():
        best = min(seconds[family])
        weights = list(model.parameters())
        products = 2 * options.streams * sum(weight.numel() for weight in weights)
        bound = max(sum(weight.nbytes for weight in weights) / bandwidth, products / rate)
        rates[family] = options.streams / best
        limits.append(options.streams / bound)
        cells = (f"{family}-{row}", f"{model.num_parameters():,}", f"{options.streams / best:,.0f}")
        cells += (f"{best * 1e6:,.0f}", f"{bound * 1e6:,.0f}", f"{bound / best:.0%}", f"{best / first:.2f}")
        lines.append([*cells, f"{sizes[family] / 1024:,.1f}"])
    return lines, rates, limits[0]


Row = tuple[str, str | None]  # a step of `step_peers` and the type of its weights


def measure_steps(name: str, rows: Sequence[Row], streams: int, options: argparse.Namespace) -> list[list[str]]:
    """Lines of the table for one model: its steps take turns; the best round of each counts."""
    peers.progress(f"{name}, {streams} stream(s)")
    models, steps, cells, rates = {}, {}, {}, [0.0, 0.0]
    for kind, weights in rows:
        try:
            # Types of weights of the compiled step are a property of a model.
            own_weights = weights if kind in ("compiled", "direct") else None
            if own_weights not in models:
                torch.manual_seed(0)
                models[own_weights] = peers.Steps(name, streams, options.exports)
            steps[kind, weights] = step = models[own_weights].get(kind, weights)
        except (ImportError, ValueError, RuntimeError) as error:
            cells[kind, weights] = [f"not measured: {str(error).splitlines()[0]}"]
            continue
        begin = time.perf_counter()
        step()
        steps[kind, weights] = peers.repeated(step, count := max(1, round(_SHORTEST / _seconds(step))))
        cells[kind, weights] = [count, time.perf_counter() - begin]
    if options.prepare or not steps:
        return []
    seconds: dict[Row, list[float]] = {row: [] for row in steps}
    with peers.no_collection():
        for _ in range(options.rounds):
            rates[0] = max(rates[0], bench.read_bandwidth(bench.CPU, 1, options.bandwidth_bytes))
            rates[1] = max(rates[1], bench.matrix_rate(bench.CPU, 1))
            for row, times in bench.seconds_in_turns(steps, 1, bench.CPU).items():
                seconds[row].append(times[0] / cells[row][0])
    ours = min(seconds.get(rows[0], [0]))
    model = next(iter(models.values())).model
    lines = []
    for kind, weights in rows:
        line = [name, peers.NAMES[kind], weights or "float32"]
        if (kind, weights) not in steps:
            lines.append([*line, *cells[kind, weights], "", "", "", ""])
            continue
        best = min(seconds[kind, weights])
        bound = max(peers.bytes_read(model, weights) / rates[0], streams * peers.products(model) / rates[1])
        line += [f"{best * 1e6:,.0f}", f"{streams / best:,.0f}", f"{bound * 1e6:,.0f}", f"{bound / best:.0%}"]
        lines.append([*line, f"{best / ours:.2f}" if ours else ""])
    return lines


def _seconds(step: peers.Step) -> float:
    begin = time.perf_counter()
    step()
    return max(time.perf_counter() - begin, 1e-6)


def rows_of(table: str, options: argparse.Namespace) -> list[Row]:
    """The steps of a table; the others are compared with the first."""
    if table == "runtimes":
        types = [None if name == "float32" else name for name in options.weights]
        rows = [(kind, weights) for weights in types for kind in (*peers.OURS, *options.runtimes)]
        return [row for row in rows if row[0] != "forward" or row[1] is None]
    if table == "weights":
        return [("compiled", weights) for weights in (None, "bfloat16", "int8")]
    return [("compiled", None), ("forward", None)]


def measure_first(name: str, options: argparse.Namespace) -> list[list[str]]:
    """Milliseconds from `from_pretrained` to the first logits, and of each byte after it."""
    peers.progress(name)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        bench.build_model(name).eval().save_pretrained(folder)
        best = [float("inf")] * 4
        for _ in range(options.rounds):
            times = [bench.clock(bench.CPU)]
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            times.append(bench.clock(bench.CPU))
            state = model.init_state(1)
            for _ in range(3):
                state = model(torch.tensor([[65]]), state=state).state
                times.append(bench.clock(bench.CPU))
            best = [min(pair) for pair in zip(best, (b - a for a, b in itertools.pairwise(times)), strict=True)]
    return [[name, *(f"{1e3 * each:,.1f}" for each in best)]]


def report_steps(table: str, options: argparse.Namespace) -> None:
    """Print a table of single steps; with --output, save it."""
    models = options.models or _MODELS[table]
    streams = 64 if table == "streams" else 1
    if table == "first":
        columns = ["model", "from_pretrained ms", "first byte ms", "second ms", "third ms"]
        lines = [line for name in models for line in measure_first(name, options)]
    else:
        columns = ["model", "step", "weights", "µs", "bytes/s", "limit µs", "of the limit", "time / compiled step"]
        lines = [line for name in models for line in measure_steps(name, rows_of(table, options), streams, options)]
    if options.prepare:
        return
    title = f"{table}, B {streams}; {bench.conditions(bench.CPU)}"
    print(f"{title}\n\n{bench.markdown_table(columns, lines)}\n")
    if options.output is not None:
        bench.save_tables(
            options.output.with_name(f"{options.output.name}_{table}"), title, bench.markdown_table(columns, lines)
        )


def main() -> None:
    """Print the table; with --output, save it with a plot."""
    parser = bench.family_parser(__doc__, rows=["s0", "s4"], streams=1, rounds=5, bandwidth_bytes=1 << 28)
    parser.add_argument("--bytes", type=int, default=32, help="new bytes per stream and round (default 32)")
    parser.add_argument("--position", type=int, default=4096, help="position at which Llama continues (default 4096)")
    parser.add_argument("--only", nargs="+", choices=["generate", *_MODELS], default=["generate"], help="tables")
    parser.add_argument("--models", nargs="+", help="presets of the other tables, such as memora-s0 or memora-s0+gru")
    parser.add_argument(
        "--runtimes", nargs="+", choices=peers.PEERS, default=list(peers.PEERS), help="exported programs"
    )
    parser.add_argument("--weights", nargs="+", choices=["float32", "bfloat16", "int8"], default=["float32", "int8"])
    parser.add_argument("--exports", type=Path, help="folder of exported programs (default: a temporary one)")
    parser.add_argument("--prepare", action="store_true", help="only write the exported programs")
    options = bench.parse_and_set_up(parser)
    with tempfile.TemporaryDirectory() as folder:
        options.exports = options.exports or Path(folder)
        for table in options.only:
            if table != "generate":
                report_steps(table, options)
    if "generate" not in options.only:
        return
    if options.bytes < 4:
        parser.error(f"--bytes is {options.bytes}; it must be at least 4.")
    rows = {row: measure_row(row, options) for row in options.rows}
    columns = ["model", "parameters", "bytes/s", "µs per step", "limit µs", "of the limit"]
    columns += [f"time / {options.families[0]}", "state KiB per stream"]
    ways = f"B {options.streams}, Llama from position {options.position:,}"
    title = f"generate(), {ways}; {bench.conditions(options.device)}"
    bench.report(title, columns, rows, options.output)


if __name__ == "__main__":
    main()
