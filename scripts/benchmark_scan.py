#!/usr/bin/env python
"""Time forward + backward of the linear recurrence, next to what the memory's bandwidth allows.

The bound is 32 bytes per element (forward reads a and b and writes h, backward reads a, h and the gradient and writes
da and db; float32), divided by the bandwidth of a large copy by the same threads, measured anew before each shape. It
is no bound in the strict sense: a copy pays for reading the lines that it then overwrites, and tensors that fit into a
cache are not read from memory. Ratios are to this bound; `resets` is the time with a reset in one of 50 steps
(--resets) over the time without. On a busy machine the best of many runs says more than their median.

    python scripts/benchmark_scan.py
    python scripts/benchmark_scan.py --shape 4x2048x512 --shape 64x64x768 --backends torch cpu --threads 1 2
    python scripts/benchmark_scan.py --backends cpu torch associative-scan mambapy --output scan_cpu
    python scripts/benchmark_scan.py --device cuda --backends torch triton --repetitions 20
"""

import argparse
import importlib.util
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from hf_recurrent.benchmarking import conditions, markdown_row, markdown_table, save_report
from hf_recurrent.modeling.linear_scan import available_backends, linear_scan

BYTES_PER_ELEMENT = 32
# Others' scans, which know no resets.
PEERS = ("torch-loop", "associative-scan", "mambapy")


class TorchLoop(torch.autograd.Function):
    """What one would write first with a backward by hand: a loop over time, one fused operation a step."""

    @staticmethod
    def forward(ctx, a, b, state):
        h, previous = torch.empty_like(b), state
        for t in range(a.shape[1]):
            torch.addcmul(b[:, t], a[:, t], previous, out=h[:, t])
            previous = h[:, t]
        ctx.save_for_backward(a, h, state)
        return h

    @staticmethod
    def backward(ctx, grad_h):
        a, h, state = ctx.saved_tensors
        grad_a, grad_b, carried = torch.empty_like(a), torch.empty_like(h), torch.zeros_like(state)
        for t in reversed(range(a.shape[1])):
            torch.add(grad_h[:, t], carried, out=grad_b[:, t])
            torch.mul(grad_b[:, t], h[:, t - 1] if t else state, out=grad_a[:, t])
            torch.mul(grad_b[:, t], a[:, t], out=carried)
        return grad_a, grad_b, carried


def associative_scan(a: torch.Tensor, b: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """torch's own scan for any associative operator, with the initial state folded into the first input."""
    from torch._higher_order_ops.associative_scan import associative_scan as scan

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    first = b[:, :1] + a[:, :1] * state.unsqueeze(1)
    return scan(combine, (a, torch.cat((first, b[:, 1:]), dim=1)), dim=1, combine_mode="generic")[1]


@cache
def mambapy_scan():
    """The parallel scan of `mambapy`, installed for this run only; it has no initial state.

    Raises:
        subprocess.CalledProcessError: the package cannot be installed here.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", directory, "mambapy"]
        subprocess.run(command, check=True)
        spec = importlib.util.spec_from_file_location("mambapy_pscan", Path(directory, "mambapy", "pscan.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

    def scan(a: torch.Tensor, b: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        first = b[:, :1] + a[:, :1] * state.unsqueeze(1)
        return module.pscan(a.unsqueeze(-1), torch.cat((first, b[:, 1:]), dim=1).unsqueeze(-1)).squeeze(-1)

    return scan


def seconds_of(function, repetitions: int, device: torch.device) -> tuple[float, float]:
    """Best and median of `repetitions` runs after one that is not counted."""
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:]), statistics.median(times[1:])


def bytes_per_second(device: torch.device, repetitions: int) -> tuple[float, float]:
    """Bandwidth of a copy of 256 MiB, read and written: at its best, and the median."""
    source = torch.ones(1 << 26, device=device)
    target = torch.ones_like(source)
    moved = 2 * source.numel() * source.element_size()
    best, median = seconds_of(lambda: target.copy_(source), repetitions, device)
    return moved / best, moved / median


def shape_of(text: str) -> tuple[int, int, int]:
    """BxTxS, such as 8x1024x768."""
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(text)
    return sizes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", dest="shapes", action="append", type=shape_of, metavar="BxTxS", help="repeatable")
    names = (*available_backends(), PEERS[0])
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=(*available_backends(), *PEERS),
        default=[name for name in names if name != "reference"],
        help="default: all that run here but the reference and the peers that take a while to compile or to install",
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="CPU threads (default 1)")
    parser.add_argument("--resets", type=float, default=0.02, help="share of steps with a reset (default 0.02)")
    parser.add_argument("--repetitions", type=int, default=15, help="runs of which best and median are taken")
    parser.add_argument("--output", type=Path, help="also write OUTPUT.md and OUTPUT.png")
    return parser.parse_args()


def scan_of(backend: str):
    """A function of (a, b, state, reset_mask) that returns h; reset_mask is None for the peers, which have none."""
    if backend == "torch-loop":
        return lambda a, b, state, resets: TorchLoop.apply(a, b, state)
    if backend == "associative-scan":
        compiled = torch.compile(associative_scan)
        return lambda a, b, state, resets: compiled(a, b, state)
    if backend == "mambapy":
        peer = mambapy_scan()
        return lambda a, b, state, resets: peer(a, b, state)
    return lambda a, b, state, resets: linear_scan(a, b, state, resets, backend=backend)[0]


class Measured(NamedTuple):
    """Milliseconds of a backend at a shape and of the bound, both at their best and in the median."""

    threads: int
    shape: tuple[int, int, int]
    backend: str
    best: float
    median: float
    best_bound: float
    median_bound: float
    best_with_resets: float | None

    def shape_name(self) -> str:
        """As `shape_of` reads it."""
        return "x".join(map(str, self.shape))

    def cells(self) -> list[str]:
        """A line of the table."""
        resets = "-" if self.best_with_resets is None else f"{self.best_with_resets / self.best:.2f}"
        times = (self.best, self.median, self.best_bound, self.best / self.best_bound, self.median / self.median_bound)
        return [str(self.threads), self.shape_name(), self.backend, *(f"{number:.2f}" for number in times), resets]


COLUMNS = ["threads", "BxTxS", "backend", "best ms", "median ms", "bound ms", "best/bound", "median/bound", "resets"]


def time_shape(shape: tuple[int, int, int], arguments: argparse.Namespace) -> Iterator[Measured]:
    """Each backend in turn."""
    device, (batch, steps, width) = arguments.device, shape
    best_copy, median_copy = bytes_per_second(device, arguments.repetitions)
    leaves = [torch.rand(shape, device=device), torch.randn(shape, device=device)]
    leaves.append(torch.randn(batch, width, device=device))
    leaves = [leaf.requires_grad_() for leaf in leaves]
    gradient = torch.randn(shape, device=device)
    resets = torch.rand(batch, steps, device=device) < arguments.resets
    moved = batch * steps * width * BYTES_PER_ELEMENT
    # Small shapes are over before the clock has settled.
    repetitions = max(arguments.repetitions, min(500, 10**8 // moved))
    for backend in arguments.backends:
        scan, results = scan_of(backend), []
        for mask in (None, resets)[: 1 if backend in PEERS else 2]:

            def forward_backward(scan=scan, mask=mask, leaves=leaves, gradient=gradient):
                torch.autograd.grad(scan(*leaves, mask), leaves, gradient)

            results.append([1e3 * seconds for seconds in seconds_of(forward_backward, repetitions, device)])
        bounds = (moved / best_copy * 1e3, moved / median_copy * 1e3)
        best_with_resets = results[1][0] if len(results) == 2 else None
        yield Measured(torch.get_num_threads(), shape, backend, *results[0], *bounds, best_with_resets)


def save(path: Path, title: str, rows: Sequence[Measured]) -> None:
    """The table and a plot of the shapes' elements per second."""
    rates: dict[str, dict[str, float]] = {}
    limits: dict[str, float] = {}
    for row in rows:
        group = f"{row.shape_name()}, {row.threads} thread(s)"
        elements = math.prod(row.shape)
        rates.setdefault(group, {})[row.backend] = elements / row.best * 1e3
        limits[group] = elements / row.best_bound * 1e3
    table = markdown_table(COLUMNS, [row.cells() for row in rows])
    save_report(path, title, table, rates, limits, "elements per second")


def main() -> None:
    """Print each line as soon as it is measured, and save table and plot if asked to."""
    arguments = parse_arguments()
    title = f"scan, forward + backward, float32; {conditions(arguments.device, arguments.threads)}"
    print(f"{title}\n\n{markdown_table(COLUMNS, [])}")
    rows = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for shape in arguments.shapes or [(8, 1024, 768), (1, 16384, 768), (256, 1, 768)]:
            for row in time_shape(shape, arguments):
                print(markdown_row(row.cells()), flush=True)
                rows.append(row)
    if arguments.output:
        save(arguments.output, title, rows)


if __name__ == "__main__":
    main()
