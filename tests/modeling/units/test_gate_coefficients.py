"""The hand-written gate arithmetic against the same formulas under autograd."""

import pytest
import torch

from hf_recurrent.modeling.scan.tiling import CPU_TILE_ELEMENTS
from hf_recurrent.modeling.units.gate_coefficients import gate_coefficients
from hf_recurrent.modeling.units.recurrent_unit import input_normalizer

LARGE = (3, CPU_TILE_ELEMENTS // 96, 96)  # three blocks and a bit


@pytest.fixture(params=["recomputed", "kept"], autouse=True)
def size_from_which_results_are_recomputed(request, monkeypatch):
    """Both ways at every size."""
    elements = 0 if request.param == "recomputed" else 1 << 62
    monkeypatch.setattr("hf_recurrent.modeling.scan.tiling.RECOMPUTED_ELEMENTS", elements)


def plainly(recurrence_gate, rate, input_gate, inputs):
    """As the papers write it, in the type of the rate."""
    recurrence_gate, input_gate, inputs = (x.to(rate.dtype) for x in (recurrence_gate, input_gate, inputs))
    log_decay = -rate * torch.sigmoid(recurrence_gate)
    return torch.exp(log_decay), input_normalizer(log_decay) * input_gate * inputs


def leaves(shape, rate_shape, dtype=torch.float64):
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    gate, input_gate, inputs = (4 * torch.randn(shape, dtype=dtype) for _ in range(3))
    rate = torch.rand(rate_shape, dtype=wide) ** 4  # slow ones too, whose decay is nearly 1
    return [x.requires_grad_() for x in (gate, rate, input_gate, inputs)]


def compare(function, given, expected_of, tolerance):
    outputs, expected = function(*given), plainly(*expected_of)
    cotangents = [torch.randn_like(x) for x in expected]
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(outputs, given, [c.to(o.dtype) for c, o in zip(cotangents, outputs, strict=True)])
    for actual, wanted, leaf in zip(grads, torch.autograd.grad(expected, expected_of, cotangents), given, strict=True):
        assert actual.dtype == leaf.dtype and actual.shape == leaf.shape
        scale = wanted.abs().max().item()
        torch.testing.assert_close(actual.to(wanted.dtype), wanted, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("shape", "rate_shape"),
    [((2, 5, 7), (7,)), (LARGE, (96,)), ((3, 4, 6), (3, 1, 6)), ((5, 8), (8,)), ((70, 1, 133), (70, 1, 133))],
    ids=["small", "blocks", "a rate for every stream", "without steps", "a rate for every row"],
)
def test_float64(shape, rate_shape):
    given = leaves(shape, rate_shape)
    compare(gate_coefficients, given, given, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_lose_nothing(dtype):
    given = leaves((2, 300, 128), (128,), dtype)
    wide = [x.detach().double().requires_grad_() for x in given]
    decay, scaled = gate_coefficients(*given)
    assert decay.dtype == scaled.dtype == torch.float32
    compare(gate_coefficients, given, wide, 2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_transposed_inputs_and_a_rate_of_zero():
    given = leaves((2, 5, 6), (6,))
    transposed = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in given if x.dim() == 3]
    rate = torch.zeros(6, dtype=torch.float64)  # r = 1: γ is clamped and its gradient zero
    moved = [x.requires_grad_() for x in (transposed[0], rate, *transposed[1:])]
    compare(gate_coefficients, moved, moved, 1e-11)
