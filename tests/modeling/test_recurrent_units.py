"""The units against loops written from the equations, and RG-LRU against transformers' own."""

import pytest
import torch
from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from hf_recurrent.modeling.recurrent_units import GLRU, RGLRU, build_recurrent_unit, input_normalizer


def initialised(unit, dtype=torch.float64):
    torch.manual_seed(1)
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        unit.reset_vectors()
    return unit.to(dtype)


def test_glru_is_its_equation():
    unit = initialised(GLRU(5, 7))
    inputs = torch.randn(2, 9, 5, dtype=torch.float64)
    reset = torch.rand(2, 9) < 0.3
    h = start = torch.randn(2, 7, dtype=torch.float64)
    outputs, final = unit(inputs, start, reset)
    for t in range(9):
        x = inputs[:, t]
        r = torch.exp(-3 * torch.exp(unit.nu) * torch.sigmoid(x @ unit.recurrence_gate.weight.T))
        h = torch.where(reset[:, t, None], 0, h)
        h = r * h + torch.sqrt(1 - r**2) * (x @ unit.input_gate.weight.T) * (x @ unit.input_projection.weight.T)
        torch.testing.assert_close(outputs[:, t], h, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(final, h, rtol=1e-12, atol=1e-12)


def test_rg_lru_is_that_of_recurrent_gemma():
    width = 12
    ours = initialised(RGLRU(width, width), torch.float32)
    theirs = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=width, num_attention_heads=1, hidden_size=width))
    with torch.no_grad():
        theirs.recurrent_param.copy_(ours.recurrent_param)
        theirs.input_gate_weight.copy_(ours.input_gate.weight.T[None])
        theirs.recurrent_gate_weight.copy_(ours.recurrence_gate.weight.T[None])
        theirs.input_gate_bias.zero_()
        theirs.recurrent_gate_bias.zero_()
    inputs = torch.randn(3, 20, width)
    # From position 1 on: position 0 is special in that class.
    expected = theirs(inputs, torch.arange(1, 21).expand(3, -1))
    actual, final = ours(inputs, torch.zeros(3, width))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final, theirs.recurrent_states, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("unit", [GLRU(6, 6), RGLRU(6, 6)], ids=["glru", "rg_lru"])
def test_ring_initialisation(unit):
    torch.manual_seed(0)
    unit = type(unit)(2000, 2000)
    with torch.no_grad():
        unit.reset_vectors()
    rate = unit.nu.exp() if isinstance(unit, GLRU) else torch.nn.functional.softplus(unit.recurrent_param)
    radius = torch.exp(-rate)
    assert radius.min() >= 0.8999
    assert radius.max() <= 0.9991
    # Uniform in the squared radius, so that the ring's area is covered evenly.
    assert abs(radius.square().mean().item() - (0.9**2 + 0.999**2) / 2) < 0.005


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [-200.0, -40.0, 0.0, 40.0, 200.0])
@pytest.mark.parametrize("name", ["glru", "rg_lru"])
def test_extreme_gates_give_finite_states_and_gradients(name, gate, dtype):
    unit = build_recurrent_unit(name, 4, 4).to(dtype)
    with torch.no_grad():
        unit.reset_vectors()
    projections = [torch.full((1, 8, 4), value, dtype=dtype, requires_grad=True) for value in (gate, 1.0, 1.0)]
    a, b = unit.coefficients(*projections)
    (a.sum() + b.sum()).backward()
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    assert all(torch.isfinite(p.grad).all() for p in projections)


def test_input_normalizer_is_exact_near_one():
    log_decay = -torch.logspace(-10, 0, 50, dtype=torch.float64)
    expected = torch.sqrt(-torch.expm1(2 * log_decay))
    torch.testing.assert_close(input_normalizer(log_decay.float()).double(), expected, rtol=1e-5, atol=0)


def test_unknown_unit_and_unfitting_width_are_refused():
    with pytest.raises(ValueError, match=r"'gru'.*glru"):
        build_recurrent_unit("gru", 4, 4)
    with pytest.raises(ValueError, match=r"rg_lru.*4.*6"):
        build_recurrent_unit("rg_lru", 4, 6)
