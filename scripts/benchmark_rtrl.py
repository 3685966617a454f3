"""Time of an RTRL step, compared with a one-step BPTT step and with the limit of memory bandwidth.

    python scripts/benchmark_rtrl.py                             # 6 layers, M 512, S 768, T 1, B 1 and 64
    python scripts/benchmark_rtrl.py --streams 1024 --device cuda
    python scripts/benchmark_rtrl.py --streams 1 --block_size 64  # the block form against 64 single steps

A step is a forward and a backward pass; an RTRL step also uses and advances the sensitivities. The bound is the time
of reading all sensitivities once and writing them once, measured as an in-place multiplication of a tensor of their
size. Kinds of steps take turns, and the best time of each counts. One CPU thread is measured in CPU time. As in
`hf-recurrent pretrain`, freed memory stays with the process, and where kernels compute a step, they have the threads.
"""

from contextlib import nullcontext

import torch
from benchmarking import CPU, build_model, option_parser, seconds_in_turns

from hf_recurrent.kernels.thread_count import threads_for_kernels
from hf_recurrent.learning_rules.rules import LearningRule, build_learning_rule
from hf_recurrent.trainers.freed_memory import keep_freed_memory
from hf_recurrent.trainers.kernel_threads import is_kernel_block


class Reader:
    """Step of one model that reads the same block repeatedly by one rule."""

    def __init__(self, model: torch.nn.Module, rule: LearningRule, streams: int, steps: int, stride: int):
        self.model, self.rule, self.stride = model, rule, stride
        self.input_ids = torch.randint(256, (streams, steps), device=model.device)
        self.state, self.carried = model.init_state(streams), rule.init_carried(streams)
        self.of_kernels = model.device.type == "cpu" and is_kernel_block(model, streams, stride)

    def __call__(self) -> None:
        with threads_for_kernels() if self.of_kernels else nullcontext():
            for part in self.input_ids.split(self.stride, 1):
                self.state = self.rule.learn(self.carried, self.state, part, part, None, part.numel()).state
        self.model.zero_grad()


def main() -> None:
    sizes = {"layers": 6, "hidden_size": 512, "state_size": 768}
    parser = option_parser(__doc__, preset="memora-s0", **sizes, streams=[1, 64], block_size=1, rounds=8, device=CPU)
    parser.add_argument("--unit", default="glru", help="recurrent unit (default glru)")
    options = parser.parse_args()
    keep_freed_memory()
    fields = {"hidden_size": options.hidden_size, "intermediate_size": 3 * options.hidden_size}
    fields |= {"state_size": options.state_size, "num_hidden_layers": options.layers, "recurrent_unit": options.unit}
    model = build_model(options.preset, options.device, **fields)
    rtrl, truncated = build_learning_rule("rtrl", model), build_learning_rule("truncated", model)
    steps = options.block_size
    print(f"{model.num_parameters():,} parameters, T {steps}, {torch.get_num_threads()} threads, {options.device}")
    columns = ("B", "S in MB", "BPTT ms", "RTRL ms", "bound ms", "RTRL/BPTT", "RTRL/bound", "(RTRL-BPTT)/bound")
    print("".join(f"{name:>18}" for name in columns) + ("" if steps == 1 else f"{'T steps ms':>18}{'speed-up':>18}"))
    for streams in options.streams:
        rules = {"bptt": truncated, "rtrl": rtrl}
        kinds = {kind: Reader(model, rule, streams, steps, steps) for kind, rule in rules.items()}
        numbers = sum(tensor.numel() for tensor in kinds["rtrl"].carried.values())
        flat = torch.ones(numbers, device=options.device)
        kinds["bound"] = lambda flat=flat: flat.mul_(0.999)
        if steps > 1:
            kinds["single"] = Reader(model, rtrl, streams, steps, 1)
        turns = seconds_in_turns(kinds, options.rounds, options.device)
        best = {kind: min(seconds) for kind, seconds in turns.items()}
        over = best["rtrl"] - best["bptt"]
        ratios = (best["rtrl"] / best["bptt"], best["rtrl"] / best["bound"], over / best["bound"])
        row = [f"{streams}", f"{numbers * 4 / 1e6:.0f}"]
        row += [f"{best[kind] * 1e3:.2f}" for kind in ("bptt", "rtrl", "bound")] + [f"{ratio:.2f}" for ratio in ratios]
        if steps > 1:
            row += [f"{best['single'] * 1e3:.2f}", f"{best['single'] / best['rtrl']:.1f}"]
        print("".join(f"{value:>18}" for value in row), flush=True)


if __name__ == "__main__":
    main()
