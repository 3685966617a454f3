#!/usr/bin/env python
"""Time of forward + backward of the linear recurrence, compared with the bandwidth of the memory.

The bound is eight numbers per element (forward reads a and b and writes h, backward reads a, h and the gradient and
writes da and db), divided by the bandwidth of a large copy by the same threads, measured before each shape. It is not
strict: a copy also reads the cache lines that it overwrites, and tensors that fit into a cache are not read from
memory. Ratios are to this bound; `resets` is the time with a reset in one of 50 steps (--resets) over the time
without. On a busy machine use the best of many runs, not their median. One CPU thread is measured in CPU time.

Other packages are installed for the run only, or into --peers_folder, where they stay. Each gets its inputs in its own
layout (logarithms of a, time last) before the clock starts, and is first checked on a small example.

    python scripts/benchmark_scan.py
    python scripts/benchmark_scan.py --shape 4x2048x512 --shape 64x64x768 --backends torch cpu --threads 1 2
    python scripts/benchmark_scan.py --backends cpu torch associative-scan mambapy --output scan_cpu
    python scripts/benchmark_scan.py --device cuda --dtype bfloat16 \\
        --backends triton torch hgrn-recurrent hgrn-chunk accelerated-scan --output scan_gpu
"""

import argparse
import itertools
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import benchmarking as bench
import scan_peers
import torch
from scan_peers import PEERS

from hf_recurrent.modeling.scan.linear_scan import available_backends, linear_scan

# The forward pass reads a and b and writes h; the backward pass reads a, h and the gradient and writes da and db.
PASSES = 8
# Default shapes. Above MOST_ELEMENTS a GPU has no room for a peer's float32 gradients.
CPU_SHAPES = [(8, 1024, 768), (1, 16384, 768), (256, 1, 768)]
GPU_SHAPES = list(itertools.product((1, 8, 64), (128, 2048, 65_536), (192, 768, 2560)))
MOST_ELEMENTS = 1 << 31


def seconds_of(function: Callable[[], object], repetitions: int, device: torch.device) -> tuple[float, float]:
    """Best and median of `repetitions` runs, after one warm-up run."""
    times = bench.seconds_in_turns({"": function}, repetitions, device)[""]
    return min(times), statistics.median(times)


def bytes_per_second(device: torch.device, repetitions: int) -> tuple[float, float]:
    """Bandwidth of a copy of 256 MiB, read and written: best and median."""
    source = torch.ones(1 << 26, device=device)
    target = torch.ones_like(source)
    moved = 2 * source.numel() * source.element_size()
    best, median = seconds_of(lambda: target.copy_(source), repetitions, device)
    return moved / best, moved / median


def parse_arguments() -> argparse.Namespace:
    parser = bench.option_parser(__doc__, threads=[1], device=bench.CPU)
    shape = bench.shape_of("BxTxS")
    parser.add_argument("--shape", dest="shapes", action="append", type=shape, metavar="BxTxS", help="repeatable")
    names = (*available_backends(), "torch-loop")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=(*available_backends(), *PEERS),
        default=[name for name in names if name != "reference"],
        help="default: all available ones except the reference and peers that are slow to compile or install",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of a, b and h")
    parser.add_argument("--resets", type=float, default=0.02, help="share of steps with a reset (default 0.02)")
    parser.add_argument("--repetitions", type=int, default=15, help="runs, for best and median")
    parser.add_argument("--peers_folder", "--peers-folder", type=Path, help="where other packages are or stay")
    parser.add_argument("--output", type=Path, help="also write OUTPUT.md and OUTPUT.png")
    return parser.parse_args()


def ready_scan(backend: str, device: torch.device) -> Callable[..., torch.Tensor]:
    """A function that computes h from (a, b, state, reset_mask) or from a peer's inputs; a peer is checked first."""
    if backend not in PEERS:
        return lambda a, b, state, resets: linear_scan(a, b, state, resets, backend=backend)[0]
    scan = PEERS[backend].load()
    scan_peers.check(backend, scan, device)
    return scan


class Measured(NamedTuple):
    """Milliseconds of a backend at a shape, and of the bound, best and median."""

    threads: int
    shape: tuple[int, int, int]
    backend: str
    best: float
    median: float
    best_bound: float
    median_bound: float
    best_with_resets: float | None

    def shape_name(self) -> str:
        """The shape as BxTxS."""
        return "x".join(map(str, self.shape))

    def cells(self) -> list[str]:
        """One line of the table."""
        resets = "-" if self.best_with_resets is None else f"{self.best_with_resets / self.best:.2f}"
        times = (self.best, self.median, self.best_bound, self.best / self.best_bound, self.median / self.median_bound)
        return [str(self.threads), self.shape_name(), self.backend, *(f"{number:.2f}" for number in times), resets]


COLUMNS = ["threads", "BxTxS", "backend", "best ms", "median ms", "bound ms", "best/bound", "median/bound", "resets"]


def time_shape(
    shape: tuple[int, int, int], scans: dict[str, Callable[..., torch.Tensor]], arguments: argparse.Namespace
) -> Iterator[Measured]:
    """Time each backend that supports the shape."""
    device, dtype, (batch, steps, width) = arguments.device, getattr(torch, arguments.dtype), shape
    best_copy, median_copy = bytes_per_second(device, arguments.repetitions)
    a, b = torch.rand(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)
    state = torch.randn(batch, width, device=device)
    mask = torch.rand(batch, steps, device=device) < arguments.resets
    moved = a.numel() * a.element_size() * PASSES
    # Small shapes need more runs for a stable time.
    repetitions = max(arguments.repetitions, min(500, 10**9 // moved))
    for backend, scan in scans.items():
        peer = PEERS.get(backend)
        if peer is not None and not peer.takes(shape):
            continue
        results = []
        for others in ((None,), (mask,)) if peer is None else ((),):
            inputs = (a, b, state) if peer is None else peer.inputs(a, b, state)
            leaves = [leaf.detach().requires_grad_() for leaf in inputs]
            gradient = torch.randn_like(leaves[0])

            def forward_backward(scan=scan, leaves=leaves, others=others, gradient=gradient):
                torch.autograd.grad(scan(*leaves, *others), leaves, gradient)

            results.append([1e3 * seconds for seconds in seconds_of(forward_backward, repetitions, device)])
        bounds = (moved / best_copy * 1e3, moved / median_copy * 1e3)
        best_with_resets = results[1][0] if len(results) == 2 else None
        yield Measured(torch.get_num_threads(), shape, backend, *results[0], *bounds, best_with_resets)


def save(path: Path, title: str, rows: Sequence[Measured]) -> None:
    """Save the table, and a plot of the shapes' elements per second."""
    rates: dict[str, dict[str, float]] = {}
    limits: dict[str, float] = {}
    for row in rows:
        group = f"{row.shape_name()}, {row.threads} thread(s)"
        elements = math.prod(row.shape)
        rates.setdefault(group, {})[row.backend] = elements / row.best * 1e3
        limits[group] = elements / row.best_bound * 1e3
    bench.save_tables(path, title, bench.markdown_table(COLUMNS, [row.cells() for row in rows]))
    bench.save_bars(path, title, rates, limits, "elements per second")


def time_all(arguments: argparse.Namespace) -> list[Measured]:
    """Time all backends, and print each line as soon as it is measured."""
    scans = {}
    for backend in arguments.backends:
        try:
            scans[backend] = ready_scan(backend, arguments.device)
        except (ImportError, OSError, RuntimeError) as error:  # for example a peer that needs a compiler for GPUs
            print(f"{backend} is skipped: {error}", file=sys.stderr)
    shapes = arguments.shapes or (CPU_SHAPES if arguments.device.type == "cpu" else GPU_SHAPES)
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for shape in shapes:
            if math.prod(shape) > MOST_ELEMENTS:
                continue
            for row in time_shape(shape, scans, arguments):
                print(bench.markdown_row(row.cells()), flush=True)
                rows.append(row)
    return rows


def main() -> None:
    """Print the table; with --output, save it with a plot."""
    arguments = parse_arguments()
    title = f"scan, forward + backward, {arguments.dtype}; {bench.conditions(arguments.device, arguments.threads)}"
    print(f"{title}\n\n{bench.markdown_table(COLUMNS, [])}")
    with tempfile.TemporaryDirectory() as temporary:
        peers = [name for name in arguments.backends if name in PEERS]
        scan_peers.install(peers, arguments.peers_folder or Path(temporary))
        rows = time_all(arguments)
    if arguments.output:
        save(arguments.output, title, rows)


if __name__ == "__main__":
    main()
