#!/usr/bin/env python
"""Time of forward + backward of the linear recurrence, compared with the bandwidth of the memory.

The bound is eight numbers per element (forward reads a and b and writes h, backward reads a, h and the gradient and
writes da and db), divided by the bandwidth of a large copy by the same threads, measured before each shape. It is not
strict: a copy also reads the cache lines that it overwrites, and tensors that fit into a cache are not read from
memory. `resets` is the time with a reset in one of 50 steps over the time without. One CPU thread is measured in CPU
time; on a GPU, `kernels ms` is the time of its kernels alone, without the calls that start them. Peers are in
`scan_peers.py`; a package that is missing is skipped with its name.

    python scripts/benchmark_scan.py
    python scripts/benchmark_scan.py --shape 4x2048x512 --shape 64x64x768 --backends torch cpu --threads 1 2
    python scripts/benchmark_scan.py --device cuda --dtype bfloat16 --backends triton torch hgrn-recurrent hgrn-chunk
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator

import benchmarking as bench
import torch
from scan_peers import PEERS
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from hf_recurrent.modeling.scan.linear_scan import available_backends, linear_scan

# The forward pass reads a and b and writes h; the backward pass reads a, h and the gradient and writes da and db.
PASSES = 8
RESETS = 0.02
CPU_SHAPES = [(8, 1024, 768), (1, 16384, 768), (256, 1, 768)]
GPU_SHAPES = [(8, 2048, 768), (32, 1024, 768), (64, 128, 192), (1, 65_536, 768), (64, 2048, 2560)]
COLUMNS = ["threads", "BxTxS", "backend", "best ms", "median ms", "bound ms"]
COLUMNS += ["best/bound", "median/bound", "resets", "kernels ms"]


def parse_arguments() -> argparse.Namespace:
    parser = bench.option_parser(__doc__, threads=[1], device=bench.CPU)
    shape = bench.shape_of("BxTxS")
    parser.add_argument("--shape", dest="shapes", action="append", type=shape, metavar="BxTxS", help="repeatable")
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=(*dict.fromkeys((*available_backends(), "cpu", "triton")), *PEERS),
        default=[*(name for name in available_backends() if name != "reference"), "torch-loop"],
        help="default: all available ones except the reference, and torch-loop",
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of a, b and h")
    parser.add_argument("--repetitions", type=int, default=15, help="runs, for best and median")
    return parser.parse_args()


def seconds_of(function: Callable[[], object], repetitions: int, device: torch.device) -> tuple[float, float]:
    """Best and median of `repetitions` runs, after one warm-up run."""
    times = bench.seconds_in_turns({"": function}, repetitions, device)[""]
    return min(times), statistics.median(times)


def kernel_milliseconds(function: Callable[[], object], device: torch.device) -> str:
    """Milliseconds of the GPU's kernels in one run; "-" on a CPU."""
    if device.type != "cuda":
        return "-"
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize(device)
    return f"{sum(event.self_device_time_total for event in found.key_averages()) / 1e3:.2f}"


def copy_seconds(moved: int, device: torch.device, repetitions: int) -> tuple[float, float]:
    """Seconds to read or write `moved` bytes at the bandwidth of a copy of 256 MiB: best and median."""
    source = torch.ones(1 << 26, device=device)
    target = torch.ones_like(source)
    best, median = seconds_of(lambda: target.copy_(source), repetitions, device)
    share = moved / (2 * source.nbytes)
    return best * share, median * share


def time_shape(
    shape: tuple[int, int, int], scans: dict[str, Callable[..., Tensor]], arguments: argparse.Namespace
) -> Iterator[list[str]]:
    device, dtype, (batch, steps, width) = arguments.device, getattr(torch, arguments.dtype), shape
    a, b = torch.rand(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)
    state, gradient = torch.randn(batch, width, device=device), torch.randn_like(b)
    mask = torch.rand(batch, steps, device=device) < RESETS
    moved = PASSES * a.nbytes
    bounds = copy_seconds(moved, device, arguments.repetitions)
    # Small shapes need more runs for a stable time.
    repetitions = max(arguments.repetitions, min(500, 10**9 // moved))
    leaves = [leaf.requires_grad_() for leaf in (a, b, state)]
    for backend, scan in scans.items():

        def forward_backward(*resets: Tensor, scan=scan) -> None:
            torch.autograd.grad(scan(*leaves, *resets), leaves, gradient)

        times = seconds_of(forward_backward, repetitions, device)
        numbers = [f"{seconds * 1e3:.2f}" for seconds in (*times, bounds[0])]
        numbers += [f"{time / bound:.2f}" for time, bound in zip(times, bounds, strict=True)]
        with_resets = "-"
        if backend not in PEERS:
            reset_seconds = seconds_of(lambda run=forward_backward: run(mask), repetitions, device)[0]
            with_resets = f"{reset_seconds / times[0]:.2f}"
        kernels = kernel_milliseconds(forward_backward, device)
        yield [str(torch.get_num_threads()), "x".join(map(str, shape)), backend, *numbers, with_resets, kernels]


def check(name: str, scan: Callable[..., Tensor], device: torch.device) -> None:
    """Raise a ValueError unless a function computes the recurrence, on a small example in float32."""
    a, b, state = (tensor.to(device) for tensor in (torch.rand(2, 32, 8), torch.randn(2, 32, 8), torch.ones(2, 8)))
    error = (scan(a, b, state) - linear_scan(a, b, state, backend="reference")[0]).abs().max().item()
    if error > 1e-4:
        raise ValueError(f"{name} is off by {error:.1e} on an example.")


def scans_of(arguments: argparse.Namespace) -> dict[str, Callable[..., Tensor]]:
    """Backend → function from (a, b, state) to h, ours also from a mask of resets; each is checked first."""
    scans = {}
    for name in arguments.backends:
        try:
            ours = lambda *inputs, name=name: linear_scan(*inputs, backend=name)[0]  # noqa: E731
            scan = PEERS[name]() if name in PEERS else ours
            check(name, scan, arguments.device)
            scans[name] = scan
        except (ImportError, OSError, RuntimeError) as error:  # such as a compiler that is missing
            print(f"{name} is skipped: {error}", file=sys.stderr)
    return scans


def main() -> None:
    arguments = parse_arguments()
    scans = scans_of(arguments)
    title = f"scan, forward + backward, {arguments.dtype}; {bench.conditions(arguments.device, arguments.threads)}"
    print(f"{title}\n\n{bench.markdown_table(COLUMNS, [])}")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for shape in arguments.shapes or (CPU_SHAPES if arguments.device.type == "cpu" else GPU_SHAPES):
            for line in time_shape(shape, scans, arguments):
                print(bench.markdown_row(line), flush=True)


if __name__ == "__main__":
    main()
