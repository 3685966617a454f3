#!/usr/bin/env python
"""Time and memory of an SMT step, compared with BPTT over the same context and with the matrix products of each.

A step is the loss of one timestep of each sequence and its gradients; the best time counts, and BPTT over Tc steps
runs once. One CPU thread is measured in CPU time. The limit is the step's own matrix products, forward and backward,
at the rate of a large one. Memory is the bytes of the tensors that the graph keeps for the backward pass.

    python scripts/benchmark_smt.py                            # width 256, 16 memory tokens, Tc 256, Tf 64, B 4
    python scripts/benchmark_smt.py --sequences 128 --device cuda --bf16
    python scripts/benchmark_smt.py --hidden_size 64 --layers 2 --readout_layers 1 --rounds 3   # seconds
"""

import argparse
from collections.abc import Callable

import benchmarking as bench
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hf_recurrent import SmtRnnConfig, SmtRnnForCausalLM, SmtTeacherConfig, SmtTeacherModel
from hf_recurrent.trainers.smt.smt_objective import SmtObjective

VOCABULARY, HEADS = 256, 8


def build_parser() -> argparse.ArgumentParser:
    sizes = {"hidden_size": 256, "layers": 8, "rounds": 8, "threads": 1, "device": bench.CPU, "matrix_size": 1024}
    parser = bench.option_parser(__doc__, **sizes)
    parser.add_argument("--memory_tokens", "--memory-tokens", type=int, default=16, help="Z")
    parser.add_argument("--readout_layers", "--readout-layers", type=int, default=4, help="of the decoder")
    parser.add_argument("--context_length", "--context-length", type=int, default=256, help="Tc")
    parser.add_argument("--future_length", "--future-length", type=int, default=64, help="Tf")
    parser.add_argument("--sequences", type=int, default=4, help="B")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    return parser


def build_losses(options: argparse.Namespace) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute the loss of one step of SMT, and of BPTT over Tc steps, from the same tokens."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": options.hidden_size,
        "num_memory_tokens": options.memory_tokens,
        "num_attention_heads": HEADS,
    }
    rnn = SmtRnnForCausalLM(
        SmtRnnConfig(num_hidden_layers=options.layers, num_readout_layers=options.readout_layers, **shape)
    ).to(options.device)
    teacher = SmtTeacherModel(
        SmtTeacherConfig(num_encoder_layers=options.layers, num_decoder_layers=options.readout_layers, **shape)
    ).to(options.device)
    before, after = options.context_length, options.future_length
    # The timestep after the first Tc + 1 tokens, so that the memory before it has a whole context too.
    ids = torch.randint(1, VOCABULARY, (options.sequences, before + after + 1), device=options.device)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    resets = torch.zeros_like(inputs, dtype=torch.bool)
    resets[:, 0] = True
    anchors = torch.full_like(ids[:, :1], before)
    objective = SmtObjective(rnn, teacher, context_length=before, future_length=after)
    autocast = torch.autocast(options.device.type, torch.bfloat16, enabled=options.bf16)
    return {
        "SMT": autocast(lambda: objective(inputs, targets, resets, anchors).total),
        "BPTT": autocast(lambda: rnn(inputs[:, :before], shift_labels=targets[:, :before], use_cache=False).loss),
    }


def product_operations(loss: Callable[[], Tensor]) -> int:
    """Floating-point operations of the matrix products of a step."""
    with FlopCounterMode(display=False) as counter:
        loss().backward()
    return counter.get_total_flops()


def time_lines(losses: dict[str, Callable[[], Tensor]], options: argparse.Namespace) -> list[list[str]]:
    """Lines of the table of times: step, milliseconds, limit, ratio to the limit."""
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    rate = bench.matrix_rate(options.device, size=options.matrix_size, dtype=dtype)
    lines = []
    for name, loss in losses.items():
        limit = product_operations(loss) / rate
        rounds = options.rounds if name == "SMT" else 1
        seconds = bench.best_seconds(lambda loss=loss: loss().backward(), rounds, options.device)
        lines.append([name, f"{seconds * 1e3:,.1f}", f"{limit * 1e3:,.1f}", f"{limit / seconds:.0%}"])
    return lines


def memory_lines(options: argparse.Namespace) -> list[list[str]]:
    """Lines of the table of memory: Tc, Z, memory per sequence in SMT, per Tc + Z, in BPTT, per Tc · Z."""
    context, memory = options.context_length, options.memory_tokens
    lines = []
    for length, tokens in [(context // 4, memory), (context // 2, memory), (context, memory), (context, 2 * memory)]:
        sizes = {"context_length": length, "memory_tokens": tokens, "sequences": 2}  # the fewest for uniformity
        losses = build_losses(argparse.Namespace(**vars(options) | sizes))
        smt, bptt = (bench.kept_bytes(losses[name]) / sizes["sequences"] for name in ("SMT", "BPTT"))
        kept = (smt / 1e6, smt / (length + tokens) / 1e3, bptt / 1e6, bptt / length / tokens / 1e3)
        lines.append([f"{length}", f"{tokens}", *(f"{number:.1f}" for number in kept)])
    return lines


def main() -> None:
    options = bench.parse_and_set_up(build_parser())
    title = (
        f"SMT step, M {options.hidden_size}, Z {options.memory_tokens}, Tc {options.context_length}, "
        f"Tf {options.future_length}, B {options.sequences}{', bfloat16' if options.bf16 else ''}; "
        f"{bench.conditions(options.device)}"
    )
    columns = ["step", "best ms", "limit ms", "of the limit"]
    bench.report(title, columns, time_lines(build_losses(options), options))
    columns = ["Tc", "Z", "SMT keeps MB per sequence", "kB per Tc + Z", "BPTT keeps MB", "kB per Tc · Z"]
    bench.report("Memory kept for the backward pass", columns, memory_lines(options))


if __name__ == "__main__":
    main()
