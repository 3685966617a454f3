"""Alternatives to `linear_scan` that `benchmark_scan.py` times: other packages, torch's own scan, a loop."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class _Loop(torch.autograd.Function):
    """A loop over time with a backward pass by hand, one fused operation per step."""

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


def _state_in_input(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """Fold the initial state into the first step of b, for scans that begin from zero."""
    return torch.cat((b[:, :1] + a[:, :1] * state.unsqueeze(1), b[:, 1:]), dim=1)


def _associative_scan() -> Callable[..., Tensor]:
    """torch's scan for any associative operator, compiled for each shape."""
    from torch._higher_order_ops.associative_scan import associative_scan

    torch._dynamo.config.recompile_limit = 64

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def scan(a, b, state):
        return associative_scan(combine, (a, _state_in_input(a, b, state)), dim=1, combine_mode="generic")[1]

    return torch.compile(scan, dynamic=False)


def _mambapy() -> Callable[..., Tensor]:
    pscan = importlib.import_module("mambapy.pscan").pscan
    return lambda a, b, state: pscan(a.unsqueeze(-1), _state_in_input(a, b, state).unsqueeze(-1)).squeeze(-1)


def _hgrn(kind: str) -> Callable[..., Tensor]:
    scan = getattr(importlib.import_module("fla.ops.hgrn"), kind)
    return lambda *inputs: scan(*inputs)[0]


def _warps(shape: tuple[int, int, int]) -> bool:
    steps = shape[1]
    return 32 <= steps <= 65_536 and steps & (steps - 1) == 0


class Peer(NamedTuple):
    """Another scan, in its own layout.

    Attributes:
        load: imports it and returns the function from its inputs to its output.
        inputs: makes its inputs from a, b (B, T, S) and the initial state (B, S), before the clock starts.
        packages: packages that it needs.
        h: makes h (B, T, S) from its output.
        from_zero: it has no initial state.
        takes: tells whether it supports a shape (B, T, S).
    """

    load: Callable[[], Callable[..., Tensor]]
    inputs: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]] = lambda a, b, state: (a, b, state)
    packages: tuple[str, ...] = ()
    h: Callable[[Tensor], Tensor] = lambda h: h
    from_zero: bool = False
    takes: Callable[[tuple[int, int, int]], bool] = lambda shape: True


_FLA = ("fla-core", "einops")
PEERS = {
    "torch-loop": Peer(lambda: _Loop.apply),
    "associative-scan": Peer(_associative_scan),
    "mambapy": Peer(_mambapy, packages=("mambapy",)),
    "hgrn-recurrent": Peer(lambda: _hgrn("fused_recurrent_hgrn"), lambda a, b, state: (b, a.log(), state), _FLA),
    # No gradient to its initial state, so it begins from zero.
    "hgrn-chunk": Peer(lambda: _hgrn("chunk_hgrn"), lambda a, b, state: (b, a.log()), _FLA, from_zero=True),
    "accelerated-scan": Peer(
        lambda: importlib.import_module("accelerated_scan.warp").scan,
        lambda a, b, state: (a.transpose(1, 2).contiguous(), b.transpose(1, 2).contiguous()),
        ("accelerated-scan",),
        h=lambda h: h.transpose(1, 2),
        from_zero=True,
        takes=_warps,
    ),
}


def install(names: list[str], folder: Path) -> None:
    """Make the packages of these peers importable from `folder`, and install the missing ones there.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed.
    """
    sys.path.append(str(folder))
    for package in dict.fromkeys(package for name in names for package in PEERS[name].packages):
        if not any(folder.glob(f"{package.replace('-', '_')}-*.dist-info")):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", str(folder), package], check=True)
    importlib.invalidate_caches()


def check(name: str, scan: Callable[..., Tensor], device: torch.device) -> None:
    """Check that a peer computes the recurrence, on a small example in float32.

    Raises:
        ValueError: its result is wrong.
    """
    peer, generator = PEERS[name], torch.Generator().manual_seed(0)
    a = torch.rand(2, 32, 8, generator=generator).to(device)
    b = torch.randn(2, 32, 8, generator=generator).to(device)
    state = torch.zeros(2, 8, device=device) if peer.from_zero else torch.ones(2, 8, device=device)
    h = peer.h(scan(*peer.inputs(a, b, state)))
    wanted = _Loop.apply(a, b, state)
    error = (h - wanted).abs().max().item()
    if error > 1e-4:
        raise ValueError(f"{name} is off by {error:.1e} on an example; is it another version?")
