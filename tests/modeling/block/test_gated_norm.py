"""The norm of a gated product with its hand-written backward pass, against the same formula under autograd."""

import pytest
import torch
from torch import nn

from hf_recurrent.modeling.block.gated_norm import gated_norm
from hf_recurrent.modeling.block.recurrent_blocks import layer_norm
from hf_recurrent.modeling.scan.tiling import CPU_TILE_ELEMENTS

SHAPES = {"small": (2, 5, 7), "blocks": (3, CPU_TILE_ELEMENTS // 96, 96), "one step": (4, 1, 24)}


@pytest.fixture(params=["recomputed", "kept"], autouse=True)
def size_from_which_results_are_recomputed(request, monkeypatch):
    """Both ways at every size."""
    elements = 0 if request.param == "recomputed" else 1 << 62
    monkeypatch.setattr("hf_recurrent.modeling.scan.tiling.RECOMPUTED_ELEMENTS", elements)


def plainly(gate, value):
    """As the paper writes it."""
    return layer_norm(nn.functional.gelu(layer_norm(gate, 1e-6)) * layer_norm(value, 1e-6), 1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_float64(shape):
    torch.manual_seed(0)
    gate, value = (3 * torch.randn(SHAPES[shape], dtype=torch.float64) + 1 for _ in range(2))
    cotangent = torch.randn_like(gate)
    # Not contiguous either: the state of all steps may be a view.
    for inputs in ((gate, value), (gate.transpose(0, 1), value.transpose(0, 1).contiguous())):
        inputs = [x.detach().requires_grad_() for x in inputs]
        weights = cotangent if inputs[0].shape == cotangent.shape else cotangent.transpose(0, 1)
        expected, actual = plainly(*inputs), gated_norm(*inputs, 1e-6)
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
        wanted = torch.autograd.grad(expected, inputs, weights)
        for gradient, other in zip(torch.autograd.grad(actual, inputs, weights), wanted, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_narrow_gate_and_a_wide_value(autocast):
    torch.manual_seed(0)
    gate = torch.randn(2, 40, 64).bfloat16().requires_grad_()
    value = torch.randn(2, 40, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = gated_norm(gate, value, 1e-6)
    assert output.dtype == torch.bfloat16
    expected = plainly(gate.float(), value)
    torch.testing.assert_close(output.float(), expected, rtol=1e-2, atol=1e-2)
    cotangent = torch.randn(2, 40, 64).bfloat16()
    grads = torch.autograd.grad(output, [gate, value], cotangent)
    wanted = torch.autograd.grad(expected, [gate, value], cotangent.float())
    assert [x.dtype for x in grads] == [torch.bfloat16, torch.float32]
    for actual, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(actual.float(), other.float(), rtol=2e-2, atol=2e-2 * other.abs().max().item())
