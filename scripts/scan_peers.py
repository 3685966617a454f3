"""Other implementations of the linear recurrence that `benchmark_scan.py` times: functions from (a, b, state) to h.

`torch-loop` is one fused operation per step with a backward pass by hand, `associative-scan` torch's own, compiled for
each shape. The others are packages: `mambapy` (`pip install mambapy`), `hgrn-recurrent` and `hgrn-chunk` (`pip install
fla-core einops`), `accelerated-scan` (`pip install accelerated-scan`).
"""

import importlib
from collections.abc import Callable

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


def _associative_scan() -> Callable[..., Tensor]:
    from torch._higher_order_ops.associative_scan import associative_scan

    torch._dynamo.config.recompile_limit = 64

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def scan(a, b, state):
        return associative_scan(combine, (a, _state_in_input(a, b, state)), dim=1, combine_mode="generic")[1]

    return torch.compile(scan, dynamic=False)


def _state_in_input(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """Fold the initial state into the first step of b, for scans that begin from zero."""
    return torch.cat(((b[:, :1] + a[:, :1] * state.unsqueeze(1)).to(b.dtype), b[:, 1:]), dim=1)


def _mambapy() -> Callable[..., Tensor]:
    scan = importlib.import_module("mambapy.pscan").pscan
    return lambda a, b, state: scan(a.unsqueeze(-1), _state_in_input(a, b, state).unsqueeze(-1)).squeeze(-1)


def _hgrn_recurrent() -> Callable[..., Tensor]:
    scan = importlib.import_module("fla.ops.hgrn").fused_recurrent_hgrn
    return lambda a, b, state: scan(b, a.log(), state)[0]


def _hgrn_chunk() -> Callable[..., Tensor]:
    scan = importlib.import_module("fla.ops.hgrn").chunk_hgrn
    return lambda a, b, state: scan(_state_in_input(a, b, state), a.log())[0]


def _accelerated_scan() -> Callable[..., Tensor]:
    scan = importlib.import_module("accelerated_scan.warp").scan

    def run(a: Tensor, b: Tensor, state: Tensor) -> Tensor:
        inputs = (a, _state_in_input(a, b, state))
        return scan(*(tensor.transpose(1, 2).contiguous() for tensor in inputs)).transpose(1, 2)

    return run


PEERS = {
    "torch-loop": lambda: _Loop.apply,
    "associative-scan": _associative_scan,
    "mambapy": _mambapy,
    "hgrn-recurrent": _hgrn_recurrent,
    "hgrn-chunk": _hgrn_chunk,
    "accelerated-scan": _accelerated_scan,
}
