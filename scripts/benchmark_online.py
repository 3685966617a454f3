"""Speed of learning from one stream: plain torch, the compiled kernel, and the limit of the machine, in one run.

    python scripts/benchmark_online.py                                # memora-tiny, RTRL, strides 1, 16, 32 and 64
    python scripts/benchmark_online.py --unit mingru --rule truncated --stride 16
    python scripts/benchmark_online.py --preset hawk-tiny
    python scripts/benchmark_online.py --preset default                # what `pretrain` trains: tables and counts too

Both learn from the same bytes, in turns, and the best time of each counts; one CPU thread is measured in CPU time. The
limit is the time of all matrix products, forward and backward, at the speed of a large product, and of one pass over
weights, gradients and moments for each of their uses, at the speed at which a sum reads as many bytes; of tables, a
step touches few rows, which are not counted.
"""

import argparse
from functools import partial

import benchmarking as bench
import torch
from benchmarking import CPU

from hf_recurrent import OnlineLearner
from hf_recurrent.cli.pretrain import build_model
from hf_recurrent.cli.pretrain_arguments import parse_arguments
from hf_recurrent.learning_rules.rules import RULES
from hf_recurrent.modeling.contexts.ngram_embedding import find_tables

# Weights are read in both passes, gradients written and read twice; the update reads and writes weights and moments.
_USES = 2 + 3 + 6


def new_learner(options: argparse.Namespace, stride: int) -> OnlineLearner:
    torch.manual_seed(0)
    if options.preset == "default":
        model = build_model(parse_arguments(["--output_dir", "unused", "--use_cpu"]).model)[0]
    else:
        model = bench.build_model(options.preset, **({"recurrent_unit": options.unit} if options.unit else {}))
    return OnlineLearner(model, rule=options.rule, stride=stride, optimizer=options.optimizer)


def bound_seconds(model: torch.nn.Module, stride: int) -> float:
    """Seconds of one block at the limits of the machine."""
    tables = {table.weight for table in find_tables(model).values()}
    weights = [weight for weight in model.parameters() if weight not in tables]
    products = sum(weight.numel() for weight in weights if weight.dim() == 2)
    size = _USES * 4 * sum(weight.numel() for weight in weights)
    return 6 * products * stride / bench.matrix_rate(CPU) + size / bench.read_bandwidth(CPU, 20, size)


def main() -> None:
    parser = bench.option_parser(__doc__, preset="memora-tiny", rounds=8, threads=1)
    parser.add_argument("--stride", type=int, nargs="+", default=[1, 16, 32, 64], help="T, bytes per update")
    parser.add_argument("--unit", help="recurrent unit; default: the preset's")
    parser.add_argument("--rule", default="rtrl", choices=RULES)
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "rmsprop"])
    parser.add_argument("--blocks", type=int, default=128, help="updates per measurement")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for stride in options.stride:
        plain, compiled = new_learner(options, stride), new_learner(options, stride)
        plain.learn_in_plain_torch()
        data = bytes((7 * i + i * i // 5) % 90 + 32 for i in range(stride * options.blocks))
        kinds = {"plain": partial(plain.read, data), "compiled": partial(compiled.read, data)}
        turns = bench.seconds_in_turns(kinds, options.rounds, CPU)
        if compiled.slow_because:
            print(f"stride {stride} is not compiled: {compiled.slow_because}")
        best = {kind: min(seconds) / options.blocks for kind, seconds in turns.items()}
        best["bound"] = bound_seconds(compiled.model, stride)
        row = [str(stride), *(f"{seconds * 1e3:.2f}" for seconds in best.values())]
        row += [f"{stride / seconds:,.0f}" for seconds in best.values()]
        rows.append([*row, f"{best['plain'] / best['compiled']:.1f}", f"{best['compiled'] / best['bound']:.1f}"])
    columns = ["stride", "plain ms", "compiled ms", "bound ms", "plain B/s", "compiled B/s", "bound B/s"]
    print(f"{options.preset}, {options.rule}, {options.optimizer}; {bench.conditions(CPU)}\n")
    print(bench.markdown_table([*columns, "plain / compiled", "compiled / bound"], rows))


if __name__ == "__main__":
    main()
