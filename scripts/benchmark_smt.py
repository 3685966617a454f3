#!/usr/bin/env python
"""Time and memory of an SMT step, compared with plain PyTorch modules that do the same products, and with BPTT.

A step is the loss of one timestep of each sequence and its gradients. The yardstick has the same matrix products at
the same shapes in stock modules (Linear, RMSNorm, scaled dot product attention, and rotary positions as in
transformers' Llama) and no padding, episodes or checks. Both take turns, and the best time of each counts; one CPU
thread is measured in CPU time. The limit is the step's own matrix products, forward and backward, at the rate of a
large one. BPTT over Tc steps runs once. Memory is the bytes of the different tensors that the graph keeps: SMT's over
Tc + Z, and for comparison that of BPTT.

    python scripts/benchmark_smt.py                            # width 256, 16 memory tokens, Tc 256, Tf 64, B 4
    python scripts/benchmark_smt.py --sequences 128 --device cuda --bf16
    python scripts/benchmark_smt.py --hidden_size 64 --layers 2 --readout_layers 1 --rounds 3   # seconds
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import benchmarking as bench
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama.modeling_llama import rotate_half

from hf_recurrent import SmtRnnConfig, SmtRnnForCausalLM, SmtTeacherConfig, SmtTeacherModel
from hf_recurrent.trainers.smt.smt_objective import SmtObjective

VOCABULARY, HEADS = 256, 8


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the script."""
    sizes = {"hidden_size": 256, "layers": 8, "rounds": 8, "threads": 1, "device": bench.CPU, "matrix_size": 1024}
    parser = bench.option_parser(__doc__, **sizes)
    parser.add_argument("--memory_tokens", "--memory-tokens", type=int, default=16, help="Z")
    parser.add_argument("--readout_layers", "--readout-layers", type=int, default=4, help="of the decoder")
    parser.add_argument("--context_length", "--context-length", type=int, default=256, help="Tc")
    parser.add_argument("--future_length", "--future-length", type=int, default=64, help="Tf")
    parser.add_argument("--sequences", type=int, default=4, help="B")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--output", type=Path, help="also write OUTPUT.md")
    return parser


class PlainLayer(nn.Module):
    """A Transformer block of stock modules; it outputs the last `num_outputs` positions."""

    def __init__(self, width: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.query, self.key_value = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], num_outputs: int, causal: bool) -> Tensor:
        first = hidden.shape[1] - num_outputs
        normed = self.norms[0](hidden)
        parts = (self.query(normed[:, first:]), *self.key_value(normed).chunk(2, -1))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        cos, sin = rotary
        query = query * cos[first:] + rotate_half(query) * sin[first:]
        key = key * cos + rotate_half(key) * sin
        mask = None
        if causal and first:
            mask = torch.ones(num_outputs, hidden.shape[1], dtype=torch.bool, device=hidden.device).tril(first)
        attended = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal and not first)
        hidden = hidden[:, first:] + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


class Yardstick(nn.Module):
    """The products of an SMT step: two memories per sequence, of which one is decoded and the other updated."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        width, self.memory_tokens = options.hidden_size, options.memory_tokens
        self.embed, self.embed_rnn = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.registers = nn.Parameter(torch.randn(self.memory_tokens, width))
        depths = {"encoder": options.layers, "decoder": options.readout_layers, "updater": options.layers}
        self.stacks = nn.ModuleDict(
            {name: nn.ModuleList([PlainLayer(width) for _ in range(depth)]) for name, depth in depths.items()}
        )
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, contexts: Tensor, futures: Tensor, targets: Tensor) -> Tensor:
        """Loss from contexts (2B, Tc), futures and targets (B, Tf)."""
        count = len(futures)
        registers = self.registers.expand(len(contexts), -1, -1)
        memories = self._run("encoder", torch.cat([self.embed(contexts), registers], 1), self.memory_tokens)
        memory, previous = F.rms_norm(memories, memories.shape[-1:]).split(count)
        hidden = torch.cat([memory, self.embed(futures)[:, :-1]], 1)
        logits = self.head(self.norm(self._run("decoder", hidden, futures.shape[1], causal=True)))
        hidden = torch.cat([previous, self.embed_rnn(contexts[:count, -1:])], 1)
        updated = self._run("updater", hidden, hidden.shape[1])[:, :-1]
        points = F.normalize(memory, dim=-1).transpose(0, 1)
        spread = (4 * points @ points.transpose(1, 2) - 4).flatten().logsumexp(0)
        error = F.mse_loss(F.rms_norm(updated, updated.shape[-1:]).float(), memory.float())
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + 0.1 * error + 0.001 * spread

    def _run(self, name: str, hidden: Tensor, num_outputs: int, causal: bool = False) -> Tensor:
        *layers, last = self.stacks[name]
        half = hidden.shape[2] // HEADS // 2
        frequencies = 10000.0 ** -(torch.arange(half, device=hidden.device) / half)
        angles = torch.outer(torch.arange(hidden.shape[1], device=hidden.device), frequencies).repeat(1, 2)
        rotary = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        for layer in layers:
            hidden = layer(hidden, rotary, hidden.shape[1], causal)
        return last(hidden, rotary, num_outputs, causal)


def build_losses(options: argparse.Namespace) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute the loss of one step of SMT, yardstick and BPTT over Tc steps, from the same tokens."""
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
    yardstick = Yardstick(options).to(options.device)
    before, after = options.context_length, options.future_length
    # The timestep after the first Tc + 1 tokens, so that the memory before it has a whole context too.
    ids = torch.randint(1, VOCABULARY, (options.sequences, before + after + 1), device=options.device)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    contexts = torch.cat([inputs[:, 1 : before + 1], inputs[:, :before]])
    futures = F.pad(inputs[:, before + 1 :], (0, 1))
    resets = torch.zeros_like(inputs, dtype=torch.bool)
    resets[:, 0] = True
    anchors = torch.full_like(ids[:, :1], before)
    objective = SmtObjective(rnn, teacher, context_length=before, future_length=after)
    autocast = torch.autocast(options.device.type, torch.bfloat16, enabled=options.bf16)
    return {
        "SMT": autocast(lambda: objective(inputs, targets, resets, anchors).total),
        "yardstick": autocast(lambda: yardstick(contexts, futures, targets[:, before:])),
        "BPTT": autocast(lambda: rnn(inputs[:, :before], shift_labels=targets[:, :before], use_cache=False).loss),
    }


def product_operations(loss: Callable[[], Tensor]) -> int:
    """Floating-point operations of the matrix products of a step."""
    with FlopCounterMode(display=False) as counter:
        loss().backward()
    return counter.get_total_flops()


def time_lines(losses: dict[str, Callable[[], Tensor]], options: argparse.Namespace) -> list[list[str]]:
    """Lines of the table of times: step, milliseconds, ratio to the yardstick, limit, ratio to the limit."""
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    rate = bench.matrix_rate(options.device, size=options.matrix_size, dtype=dtype)
    limits = {name: product_operations(loss) / rate for name, loss in losses.items()}
    steps = {name: lambda loss=loss: loss().backward() for name, loss in losses.items()}
    bptt = steps.pop("BPTT")
    turns = bench.seconds_in_turns(steps, options.rounds, options.device)
    seconds = {name: min(times) for name, times in turns.items()}
    seconds["BPTT"] = bench.best_seconds(bptt, 1, options.device)
    lines = []
    for name, time in seconds.items():
        cells = (f"{time * 1e3:,.1f}", f"{time / seconds['yardstick']:.2f}", f"{limits[name] * 1e3:,.1f}")
        lines.append([name, *cells, f"{limits[name] / time:.0%}"])
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
    """Print times and memory as tables; with --output, save them."""
    options = bench.parse_and_set_up(build_parser())
    title = (
        f"SMT step, M {options.hidden_size}, Z {options.memory_tokens}, Tc {options.context_length}, "
        f"Tf {options.future_length}, B {options.sequences}{', bfloat16' if options.bf16 else ''}; "
        f"{bench.conditions(options.device)}"
    )
    columns = ["step", "best ms", "of the yardstick's time", "limit ms", "of the limit"]
    times = bench.markdown_table(columns, time_lines(build_losses(options), options))
    print(f"{title}\n\n{times}\n", flush=True)
    columns = ["Tc", "Z", "SMT keeps MB per sequence", "kB per Tc + Z", "BPTT keeps MB", "kB per Tc · Z"]
    memory = bench.markdown_table(columns, memory_lines(options))
    print(memory)
    if options.output is not None:
        bench.save_tables(options.output, title, times, memory)


if __name__ == "__main__":
    main()
