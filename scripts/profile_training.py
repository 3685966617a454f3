#!/usr/bin/env python
"""Time of the parts of a training step, compared with the limit of its matrix products.

    python scripts/profile_training.py                          # one thread and two
    python scripts/profile_training.py --steps default memora-s0 --threads 1 2 8
    python scripts/profile_training.py --steps default memora-s0 --threads 1 --simulated_threads 4 8

A step is forward, backward and the optimizer: of the default run (two micro-batches of 32 streams of 128 bytes, with
tables of n-grams), of Memora-S0 and Hawk-S0 (16 streams of 64 bytes), and, without the optimizer, of real-time
recurrent learning (Memora of M 256, S 384 and 4 layers, 64 streams) and Supervised Memory Training. The limit is the
products' operations at the rate of the fastest large product in the same run. `other` is what is in no operator:
Python, autograd, calls. Where the CPU multiplies bfloat16 numbers faster, the step is measured with `--bf16_products`
too. Of n simulated threads one computes its n-th of the streams, and all that is not shared: what n cores would
reach at best, if memory and caches were as fast for all of them.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import benchmark_rtrl
import benchmark_smt
import benchmarking as bench
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from hf_recurrent.cli.pretrain import build_model
from hf_recurrent.cli.pretrain_arguments import parse_arguments
from hf_recurrent.learning_rules.joint_optimizer import join_optimizers
from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.modeling.block.linear_maps import rounded_products
from hf_recurrent.modeling.block.training_kernels import training_module
from hf_recurrent.trainers.freed_memory import keep_freed_memory
from hf_recurrent.trainers.table_gradients import TableGradients

# Kind of work → beginnings of the operators' names; the first that fits counts.
KINDS = {
    "whole layers": ("FusedLayer",),
    "loss": ("_FusedCrossEntropy", "aten::_log_softmax", "aten::nll_loss", "aten::log_softmax"),
    "products": ("_LinearMaps", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product"),
    "tables": ("_TableSum", "Optimizer.step#RowwiseAdagrad", "aten::sort", "aten::cumsum"),
    "scan": ("_LinearScan", "hf_recurrent::linear_scan", "_Sensitivities"),
    "norms and gates": ("_Fused", "_GatedGelu", "_RmsNorm", "aten::native_layer_norm", "aten::gelu", "aten::sigmoid"),
    "optimizer": ("Optimizer.", "aten::_fused_adamw"),
    "other operators": ("aten::", "autograd::engine"),
}
STEPS = ("default", "memora-s0", "hawk-s0", "rtrl", "smt")


def trained(
    model: torch.nn.Module, streams: int, steps: int, micro_batches: int = 1
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A whole step of a language model on text, and its forward and backward passes alone."""
    dense = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    optimizer, tables = join_optimizers(dense, model), TableGradients(model, 1)
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    ids = torch.tensor(list(text[: micro_batches * streams * steps])).view(micro_batches, streams, steps)
    model.train()

    def passes() -> None:
        with tables.coalescing():
            for batch in ids:
                (model(batch, labels=batch).loss / micro_batches).backward()
            tables.average()

    def step() -> None:
        passes()
        optimizer.step()
        optimizer.zero_grad()

    return step, passes


def share(streams: int, parts: int) -> int:
    if streams % parts:
        sys.exit(f"`--simulated_threads` {parts} does not divide the step's {streams} streams.")
    return streams // parts


def build_step(name: str, parts: int = 1) -> tuple[Callable[[], None], Callable[[], None]]:
    """The step `name` of [`STEPS`] with one of `parts` of its streams, and the part of it that has matrix products."""
    if name == "default":
        arguments = parse_arguments(["--output_dir", str(Path("unused")), "--use_cpu"])
        arguments.model.config_overrides.append("count_memory_slots=0")
        run = arguments.training
        shape = share(run.per_device_train_batch_size, parts), run.block_size, run.gradient_accumulation_steps
        return trained(build_model(arguments.model)[0], *shape)
    if name == "rtrl":
        sizes = {"hidden_size": 256, "state_size": 384, "intermediate_size": 768, "num_hidden_layers": 4}
        model = bench.build_model("memora-s0", **sizes)
        step = benchmark_rtrl.Reader(model, build_learning_rule("rtrl", model), share(64, parts), 1, 1)
        return step, step
    if name == "smt":
        sequences = benchmark_smt.build_parser().get_default("sequences")
        options = benchmark_smt.build_parser().parse_args(["--sequences", f"{share(sequences, parts)}"])
        loss = benchmark_smt.build_losses(options)["SMT"]
        return (lambda: loss().backward(),) * 2
    return trained(bench.build_model(name), share(16, parts), 64)


def kinds_of_time(step: Callable[[], None], repetitions: int) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        begin = time.perf_counter()
        for _ in range(repetitions):
            step()
        seconds = time.perf_counter() - begin
    shares = dict.fromkeys(KINDS, 0.0)
    for event in profiled.key_averages():
        kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), None)
        if kind is not None:
            shares[kind] += event.self_cpu_time_total / 1e6
    shares["other"] = max(0.0, seconds - sum(shares.values()))
    return {kind: value / repetitions for kind, value in shares.items()}


def seconds_with_bf16(step: Callable[[], None], rounds: int) -> float | None:
    """Seconds of a step with rounded products; None where the processor has none."""
    kernels = training_module()
    if kernels is None or not kernels.has_fast_bf16_products():
        return None
    with rounded_products():
        return bench.best_seconds(step, rounds, bench.CPU)


def cells_of_step(name: str, threads: int, parts: int, options: argparse.Namespace) -> list[str]:
    torch.manual_seed(0)
    step, passes = build_step(name, parts)
    with FlopCounterMode(display=False) as counter:
        passes()
    torch.set_num_threads(threads)
    rate = bench.matrix_rate(bench.CPU, 3, options.matrix_size)
    seconds = bench.best_seconds(step, options.rounds, bench.CPU)
    rate = max(rate, bench.matrix_rate(bench.CPU, 3, options.matrix_size))
    limit, rounded = counter.get_total_flops() / rate, seconds_with_bf16(step, options.rounds)
    times = kinds_of_time(step, max(1, options.rounds // 4))
    shares = [f"{value / sum(times.values()):.0%}" for value in times.values()]
    cells = [f"{rate / 1e9:.0f}", f"{seconds * 1e3:.1f}", f"{limit * 1e3:.1f}", f"{limit / seconds:.0%}"]
    cells += ["-", "-"] if rounded is None else [f"{rounded * 1e3:.1f}", f"{seconds / rounded:.2f}"]
    return [name, f"{threads}" if parts == 1 else f"{parts} (simulated)", *cells, *shares]


def main() -> None:
    parser = bench.option_parser(__doc__, rounds=20, matrix_size=1024)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="steps to profile")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="CPU threads (default 1 2)")
    simulated = "more threads than there are cores, of which one is computed"
    parser.add_argument("--simulated_threads", nargs="+", type=int, default=[], help=simulated)
    options = parser.parse_args()
    keep_freed_memory()  # as in training
    lines = []
    for name in options.steps:
        lines += [cells_of_step(name, threads, 1, options) for threads in options.threads]
        lines += [cells_of_step(name, 1, parts, options) for parts in options.simulated_threads]
    columns = ["step", "threads", "GFLOP/s", "ms", "limit ms", "of the limit", "bf16 ms", "times as fast"]
    columns += [*KINDS, "other"]
    bench.report(f"Training steps; {bench.conditions(bench.CPU, options.threads)}", columns, lines)


if __name__ == "__main__":
    main()
