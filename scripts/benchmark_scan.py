#!/usr/bin/env python
"""Time forward + backward of the linear recurrence, next to what the memory's bandwidth allows.

The bound is 32 bytes per element (forward reads a and b and writes h, backward reads a, h and the gradient and writes
da and db; float32), divided by the bandwidth of a large copy measured in the same run.

    python scripts/benchmark_scan.py
    python scripts/benchmark_scan.py --shape 4x2048x512 --shape 64x64x768 --backends torch
    python scripts/benchmark_scan.py --device cuda --backends torch triton --repetitions 20
"""

import argparse
import statistics
import time

import torch

from hf_recurrent.modeling.linear_scan import available_backends, linear_scan

BYTES_PER_ELEMENT = 32


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


def median_seconds(function, repetitions: int, device: torch.device) -> float:
    """Median of `repetitions` runs after one that is not counted."""
    times = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def bytes_per_second(device: torch.device, repetitions: int) -> float:
    """Bandwidth of a copy of 256 MiB, read and written."""
    source = torch.ones(1 << 26, device=device)
    target = torch.ones_like(source)
    return (
        2 * source.numel() * source.element_size() / median_seconds(lambda: target.copy_(source), repetitions, device)
    )


def shape_of(text: str) -> tuple[int, int, int]:
    """BxTxS, such as 8x1024x768."""
    sizes = tuple(int(size) for size in text.split("x"))
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(text)
    return sizes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", dest="shapes", action="append", type=shape_of, metavar="BxTxS", help="repeatable")
    names = (*available_backends(), "torch-loop")
    parser.add_argument("--backends", nargs="+", choices=names, default=names, help="default: all that run here")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--repetitions", type=int, default=7, help="runs per median (default 7)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    device = arguments.device
    bandwidth = bytes_per_second(device, arguments.repetitions)
    print(f"float32, {device}, {arguments.threads} thread(s), copy bandwidth {bandwidth / 1e9:.1f} GB/s")
    print(f"{'shape':>14}  {'backend':<11}{'ms':>10}{'bound ms':>10}{'ratio':>8}")
    for shape in arguments.shapes or [(8, 1024, 768), (1, 16384, 768), (256, 1, 768)]:
        batch, steps, width = shape
        leaves = [torch.rand(shape, device=device), torch.randn(shape, device=device)]
        leaves.append(torch.randn(batch, width, device=device))
        leaves = [leaf.requires_grad_() for leaf in leaves]
        gradient = torch.randn(shape, device=device)
        bound = batch * steps * width * BYTES_PER_ELEMENT / bandwidth
        for backend in arguments.backends:

            def forward_backward(backend=backend, leaves=leaves, gradient=gradient):
                h = TorchLoop.apply(*leaves) if backend == "torch-loop" else linear_scan(*leaves, backend=backend)[0]
                torch.autograd.grad(h, leaves, gradient)

            seconds = median_seconds(forward_backward, arguments.repetitions, device)
            name = "x".join(map(str, shape))
            print(
                f"{name:>14}  {backend:<11}{seconds * 1e3:10.2f}{bound * 1e3:10.2f}{seconds / bound:8.1f}", flush=True
            )


if __name__ == "__main__":
    main()
