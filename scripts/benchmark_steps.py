#!/usr/bin/env python
"""Time of one step: `forward`, the compiled step, and exported programs of the same model in other runtimes.

The limit is one pass over the weights that a token needs, or its matrix products with all streams where they take
longer, at the bandwidth and the rate measured in the same run. One CPU thread is measured in CPU time. Steps take
turns; the best round of each counts. Microseconds of `model()` around the step are the median of 200 calls: with a
large model they are less than what two measurements differ by.

    python scripts/benchmark_steps.py --models hawk-s4 memora-s0+gru smt-rnn-tiny --runtimes
    python scripts/benchmark_steps.py --models memora-s0 lru-tiny --weights float32 int8
    python scripts/benchmark_steps.py --models memora-s4 --runtimes --streams 64
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import benchmarking as bench
import torch
from transformers import PreTrainedModel

from hf_recurrent import save_exported_step
from hf_recurrent.export.exported_step import read_specification
from hf_recurrent.export.runtimes import RUNTIMES
from hf_recurrent.modeling.step.compiled_step import CompiledStep
from hf_recurrent.modeling.step.single_step import find_single_step, plain_forward

OURS = {
    "direct": "compiled step, called directly",
    "loop": "compiled step, `model()` as in `generate()`",
    "compiled": "compiled step, `model()`",
    "forward": "forward",
}
PEERS = {"torch": "torch.export", "aoti": "AOTInductor", "onnx": "onnxruntime", "executorch": "ExecuTorch"}
WIDTHS = {"float32": 4, "bfloat16": 2, "int8": 1}
# Seconds of one measurement, for steps of microseconds.
SHORTEST = 0.01


def bytes_read(model: PreTrainedModel, weights: str) -> int:
    """Bytes of weights that one token needs: matrices in the type of `weights`, one row of an embedding of its own."""
    width = WIDTHS[weights]
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    total = sum((width if each.dim() == 2 else each.element_size()) * each.numel() for each in model.parameters())
    return total - (0 if embedding is head else embedding.numel() * width)


def build_step(model: PreTrainedModel, kind: str, weights: str, ids: torch.Tensor) -> Callable[[], object]:
    """A function that reads one token of every stream, ids (B, 1), after the tokens of its last call."""
    state = model.init_state(len(ids))
    if kind in RUNTIMES:
        return _exported_step(model, kind, weights, [ids[:, 0], *state.values()])
    if kind != "forward":
        model.compile_step(None if weights == "float32" else weights)
    with torch.no_grad():
        compiled = find_single_step(model, ids) if kind == "direct" else None
    loop = model.loop_of_steps() if kind == "loop" else {}

    @torch.no_grad()
    def step() -> None:
        nonlocal state
        if kind == "direct":
            state = compiled.run(model, ids, state)[1]
        elif kind in ("compiled", "loop"):
            state = model(ids, state=state, **loop).state
        else:
            with plain_forward():
                state = model(ids, state=state).state

    return step


def _exported_step(
    model: PreTrainedModel, runtime: str, weights: str, tensors: list[torch.Tensor]
) -> Callable[[], object]:
    """An exported program, called without checks of its inputs."""
    with tempfile.TemporaryDirectory() as folder:
        save_exported_step(model, folder, runtime=runtime, weights=None if weights == "float32" else weights)
        if runtime == "executorch":
            from executorch.extension.pybindings import portable_lib

            portable_lib._unsafe_reset_threadpool(torch.get_num_threads())  # nothing public sets it
        run = RUNTIMES[runtime].load(Path(folder, read_specification(folder).program))

    def step() -> None:
        tensors[1:] = run(tensors)[1:]

    return step


def repeated(step: Callable[[], object], count: int) -> Callable[[], None]:

    def run() -> None:
        for _ in range(count):
            step()

    return run


@torch.no_grad()
def seconds_around(model: PreTrainedModel, ids: torch.Tensor, is_loop: bool) -> float:
    """Median seconds of `model()` before and after the compiled step within it."""
    run, inside, whole = CompiledStep.run, [], []
    loop, state = model.loop_of_steps() if is_loop else {}, model.init_state(len(ids))

    def timed(*arguments: object) -> object:
        begin = time.perf_counter()
        result = run(*arguments)
        inside.append(time.perf_counter() - begin)
        return result

    with mock.patch.object(CompiledStep, "run", timed):
        for _ in range(200):
            begin = time.perf_counter()
            output = model(ids, state=state, **loop)
            whole.append(time.perf_counter() - begin)
            state = output.state
    return statistics.median(total - part for total, part in zip(whole, inside, strict=True))


def measure(name: str, weights: str, options: argparse.Namespace) -> list[list[str]]:
    """The table's lines of one model and type of weights."""
    kinds = [kind for kind in OURS if kind != "forward" or weights == "float32"] + options.runtimes
    ids = torch.randint(1, 256, (options.streams, 1))
    steps, counts, around, failed = {}, {}, {}, {}
    for kind in kinds:
        print(f"{name}, {weights}, {kind}", file=sys.stderr, flush=True)
        torch.manual_seed(0)
        model = bench.build_model(name).eval()  # its own: the type of the compiled step's weights is the model's
        try:
            step = build_step(model, kind, weights, ids)
            counts[kind] = max(1, round(SHORTEST / max(bench.best_seconds(step, 1, bench.CPU), 1e-6)))
        except (ImportError, ValueError, RuntimeError) as error:
            failed[kind] = str(error).splitlines()[0]
            continue
        steps[kind] = repeated(step, counts[kind])
        if kind in ("loop", "compiled"):
            around[kind] = f"{seconds_around(model, ids, kind == 'loop') * 1e6:,.0f}"
    gc.disable()
    turns = bench.seconds_in_turns(steps, options.rounds, bench.CPU)
    gc.enable()
    bandwidth = bench.read_bandwidth(bench.CPU, options.rounds, options.bandwidth_bytes)
    products = 2 * options.streams * bytes_read(model, "int8")
    bound = max(bytes_read(model, weights) / bandwidth, products / bench.matrix_rate(bench.CPU, options.rounds))
    best = {kind: min(times) / counts[kind] for kind, times in turns.items()}
    lines = []
    for kind in kinds:
        line = [name, (OURS | PEERS)[kind], weights]
        if kind in failed:
            lines.append([*line, f"not measured: {failed[kind]}", *[""] * 5])
            continue
        numbers = f"{best[kind] * 1e6:,.0f}", around.get(kind, ""), f"{options.streams / best[kind]:,.0f}"
        numbers += (f"{bound * 1e6:,.0f}",)
        lines.append([*line, *numbers, f"{bound / best[kind]:.0%}", f"{best[kind] / best['direct']:.2f}"])
    return lines


def main() -> None:
    parser = bench.option_parser(__doc__, streams=1, rounds=5, threads=1, bandwidth_bytes=1 << 28)
    add = parser.add_argument
    add("--models", nargs="+", default=["memora-s0", "lru-tiny"], help="presets, also as memora-s0+gru")
    add("--runtimes", nargs="*", choices=PEERS, default=list(PEERS), help="exported programs")
    add("--weights", nargs="+", choices=WIDTHS, default=["float32", "int8"])
    options = bench.parse_and_set_up(parser)
    lines = []
    for name in options.models:
        for weights in options.weights:
            lines += measure(name, weights, options)
    columns = ["model", "step", "weights", "µs", "µs around the step", "bytes/s"]
    columns += ["limit µs", "of the limit", "time / direct"]
    bench.report(f"One step, B {options.streams}; {bench.conditions(bench.CPU)}", columns, lines)


if __name__ == "__main__":
    main()
