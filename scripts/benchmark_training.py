#!/usr/bin/env python
"""Bytes per second of a training step, compared with its matrix products and the stock models of the same size.

A step is forward, backward and AdamW on B streams of T bytes. The limit is six floating-point operations per parameter
and byte at the rate of a large matrix product, measured in the same run. Memory is what autograd keeps for the
backward pass, without parameters, per trained byte; on a GPU the peak is printed too. One CPU thread is measured in
CPU time. Models take turns; the best round counts. Without its GPU kernels Mamba2 in `transformers` takes gigabytes,
so on a CPU it reads one stream at a time.

    python scripts/benchmark_training.py
    python scripts/benchmark_training.py --families memora llama --compiled llama    # Llama through torch.compile too
    python scripts/benchmark_training.py --rows s0 s4 --device cuda --streams 32 --bf16 --captured memora hawk
    python scripts/benchmark_training.py --units --block_size 512      # Memora with each recurrent unit

RG-LRU does not work in Memora's block; it runs in Hawk's, whose other parts differ.
"""

import argparse
from contextlib import nullcontext

import benchmarking as bench
import torch

from hf_recurrent.modeling.step.captured_block import CapturedTraining
from hf_recurrent.modeling.units.recurrent_units import RECURRENT_UNITS


class TrainedModel:
    def __init__(self, family: str, row: str, options: argparse.Namespace, way: str = ""):
        name, *unit = family.split("+")
        self.name = f"{family}-{row} ({way})" if way else f"{family}-{row}"
        self.model = bench.build_model("+".join([f"{name}-{row}", *unit]), options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.streams = 1 if family == "mamba2" and options.device.type == "cpu" else options.streams
        self.input_ids = torch.randint(1, 256, (self.streams, options.block_size), device=options.device)
        self.forward = torch.compile(self.model) if way == "compiled" else self.model
        captured = CapturedTraining(self.model.model) if way == "CUDA graphs" else None
        self.replayed = nullcontext if captured is None else captured.active
        self.autocast = torch.autocast(options.device.type, torch.bfloat16, enabled=options.bf16)
        self.device, self.seconds = options.device, []

    def loss(self) -> torch.Tensor:
        with self.autocast, self.replayed():
            return self.forward(self.input_ids, labels=self.input_ids).loss

    def step(self) -> None:
        begin = bench.clock(self.device)
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(bench.clock(self.device) - begin)


def measure_row(row: str, options: argparse.Namespace) -> list[list[str]]:
    models = {family: TrainedModel(family, row, options) for family in options.families}
    models |= {f"{family} compiled": TrainedModel(family, row, options, "compiled") for family in options.compiled}
    models |= {f"{family} captured": TrainedModel(family, row, options, "CUDA graphs") for family in options.captured}
    kept = {family: bench.kept_bytes(trained.loss) for family, trained in models.items()}
    operations, dtype = [], torch.bfloat16 if options.bf16 else torch.float32
    for _ in range(options.rounds):
        operations.append(bench.matrix_rate(options.device, 1, options.matrix_size, dtype))
        for trained in models.values():
            trained.step()
    rates = {family: trained.input_ids.numel() / min(trained.seconds) for family, trained in models.items()}
    lines = []
    for family, trained in models.items():
        rate, limit = rates[family], max(operations) / (6 * trained.model.num_parameters())
        cells = (trained.name, f"{trained.model.num_parameters():,}", f"{trained.streams}")
        cells += (f"{rate:,.0f}", f"{limit:,.0f}", f"{rate / limit:.0%}", f"{rates[options.families[0]] / rate:.2f}")
        lines.append([*cells, f"{kept[family] / trained.input_ids.numel() / 1024:,.1f}"])
    return lines


def main() -> None:
    parser = bench.family_parser(__doc__, rows=["s0"], streams=8, block_size=1024, rounds=3, matrix_size=1024)
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--compiled", nargs="+", choices=bench.FAMILIES, default=[], help="through torch.compile too")
    captured = {"nargs": "+", "choices": ("memora", "hawk"), "default": []}
    parser.add_argument("--captured", **captured, help="with their layers as CUDA graphs too, as trainers run them")
    parser.add_argument("--units", action="store_true", help="compare the recurrent units instead of families")
    options = bench.parse_and_set_up(parser)
    if options.units:
        options.families = [f"{'hawk' if unit == 'rg_lru' else 'memora'}+{unit}" for unit in RECURRENT_UNITS]
    lines = [line for row in options.rows for line in measure_row(row, options)]
    columns = ["model", "parameters", "B", "bytes/s", "limit bytes/s", "of the limit"]
    columns += [f"{options.families[0]} is … times as fast", "KiB kept per byte"]
    ways = [f"T {options.block_size}", *["bfloat16"] * options.bf16]
    title = f"Training step, {', '.join(ways)}; {bench.conditions(options.device)}"
    if options.device.type == "cuda":
        title += f"; peak of all models {torch.cuda.max_memory_allocated(options.device) / 2**30:.1f} GiB"
    bench.report(title, columns, lines)


if __name__ == "__main__":
    main()
