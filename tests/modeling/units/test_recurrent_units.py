"""Initialisation, sizes and extremes of the units, and models with each of them."""

import math

import pytest
import torch
from model_cases import tiny_config, tiny_model
from torch.nn.functional import softplus
from unit_cases import REAL_UNITS, STEPS, UNITS, WIDTH, initialised

from hf_recurrent import config_from_preset
from hf_recurrent.modeling.memora.modeling_memora import MemoraForCausalLM
from hf_recurrent.modeling.units.gated_units import GLRU, HGRN, RGLRU
from hf_recurrent.modeling.units.recurrent_unit import RING_RADIUS, input_normalizer
from hf_recurrent.modeling.units.recurrent_units import build_recurrent_unit


@pytest.mark.parametrize(("r_min", "r_max", "max_phase"), [(0.0, 1.0, 6.28), (0.9, 0.999, 0.3), (0.5, 0.5, 1.0)])
def test_lru_starts_uniform_on_its_ring(r_min, r_max, max_phase):
    torch.manual_seed(0)
    unit = build_recurrent_unit("lru", 4, 8000, r_min=r_min, r_max=r_max, max_phase=max_phase)
    with torch.no_grad():
        unit.reset_parameters()
    radius, phase = torch.exp(-torch.exp(unit.nu)), torch.exp(unit.theta)
    assert r_min - 1e-4 <= radius.min() <= radius.max() <= r_max + 1e-4
    assert abs(radius.square().mean().item() - (r_min**2 + r_max**2) / 2) < 0.01
    assert 0 < phase.min() <= phase.max() <= max_phase
    assert phase.mean().item() == pytest.approx(max_phase / 2, rel=0.03)
    gamma = torch.sqrt(-torch.expm1(-2 * torch.exp(unit.nu.double())))
    torch.testing.assert_close(torch.exp(unit.log_gamma).double(), gamma, rtol=1e-4, atol=1e-5)
    assert all(torch.isfinite(parameter).all() for parameter in (unit.nu, unit.theta, unit.log_gamma))


def test_dense_linear_starts_as_a_rotation():
    unit = initialised("dense_linear")
    weight = unit.recurrent_map.weight
    expected = 0.88**2 * torch.eye(WIDTH, dtype=torch.float64)
    torch.testing.assert_close(weight @ weight.T, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["memora", "lru"])
def test_a_model_initialises_units_without_vectors(family, tmp_path):
    model = tiny_model(family, recurrent_unit="dense_linear")
    maps = [weight for name, weight in model.named_parameters() if "recurrent_map" in name]
    for weight in maps:
        torch.testing.assert_close(weight @ weight.T, 0.88**2 * torch.eye(24), rtol=1e-5, atol=1e-5)
        torch.nn.init.ones_(weight)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert len(maps) == 2 and all(
        (weight == 1).all() for n, weight in loaded.named_parameters() if "recurrent_map" in n
    )


def test_the_stabiliser_of_slstm_changes_no_output():
    """Against gates without it, in float64; and finite where exp(i) is not."""
    unit = initialised("slstm")
    inputs = torch.randn(1, STEPS, WIDTH, dtype=torch.float64)
    outputs, _ = unit(inputs, torch.zeros(1, WIDTH, dtype=torch.float64))
    c = n = h = torch.zeros(unit.output_size, dtype=torch.float64)
    for x, output in zip(inputs[0], outputs[0], strict=True):
        i, f = torch.exp(unit.input_gate(x) + unit.input_weight * h), unit.forget_gate(x) + unit.forget_weight * h
        c = torch.sigmoid(f) * c + i * torch.tanh(unit.candidate(x) + unit.candidate_weight * h)
        n = torch.sigmoid(f) * n + i
        h = torch.sigmoid(unit.output_gate(x) + unit.output_weight * h) * c / n
        torch.testing.assert_close(output, h, rtol=1e-12, atol=1e-12)
    far = (400 * torch.randn(2, STEPS, WIDTH)).requires_grad_()
    outputs, final = unit.float()(far, torch.zeros(2, WIDTH))
    (outputs.sum() + final.sum()).backward()
    assert outputs.isfinite().all() and final.isfinite().all() and far.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "numbers"), [("sru", 2), ("slstm", 4), ("h3", 4), ("mamba2", 4), ("gated_delta", 4), ("rwkv7", 4)]
)
def test_states_of_several_numbers_a_channel(name, numbers):
    with pytest.raises(ValueError, match=f"`state_size` is 6|`state_size` is 7.*multiple of {numbers}"):
        build_recurrent_unit(name, 8, 6 if numbers == 4 else 7)
    assert build_recurrent_unit(name, 8, 16).output_size == 16 // numbers
    with pytest.raises(ValueError, match="must have 24, because the layer adds it"):
        tiny_model("mgrade", recurrent_unit=name)


def test_gss_is_narrow_inside_and_wide_outside():
    unit = build_recurrent_unit("gss", 6, 16)
    assert (unit.channels, unit.output_size) == (4, 16)
    assert {name: tuple(p.shape) for name, p in unit.named_parameters()} == {
        "input_projection.weight": (4, 6), "log_rate": (8,), "log_frequency": (8,), "state_weight": (16,),
        "skip_weight": (4,), "expansion.weight": (16, 4),
    }  # fmt: skip
    with pytest.raises(ValueError, match="`state_size` is 6; GSS needs a multiple of 4"):
        build_recurrent_unit("gss", 6, 6)


def test_h3_recalls_the_value_after_a_key():
    """Set by hand: keys shifted by one step meet their values, h keeps the sum, and the query reads it."""
    unit = build_recurrent_unit("h3", 3, 8)
    keys = torch.tensor([[1.0, 0, 0], [0, 1, 0]])
    with torch.no_grad():
        unit.reset_parameters()
        for weights, values in ((unit.query, keys), (unit.key, keys), (unit.value, torch.tensor([[0, 0, 1.0]] * 2))):
            weights.weight.copy_(values)
        unit.shift_weight.copy_(torch.tensor([0.0, 0, 1, 1]))
        unit.log_rate.fill_(-20)
        unit.log_step.zero_()
        unit.state_weight.copy_(torch.tensor([1.0, 1, 0, 0]))
        unit.skip_weight.zero_()
        # Key a, 5, key b, 7, then both keys again; the last column of an input is a value.
        a, b = torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 1, 0])
        inputs = torch.stack([a, torch.tensor([0, 0, 5.0]), b, torch.tensor([0, 0, 7.0]), b, a])
        outputs, _ = unit(inputs[None], torch.zeros(1, 8))
    expected = torch.tensor([[0, 0], [0, 0], [0, 0], [0, 0], [0, 7], [5, 0.0]])
    torch.testing.assert_close(outputs[0], expected, rtol=1e-4, atol=1e-4)


def test_mamba2_starts_in_its_ranges():
    torch.manual_seed(0)
    unit = build_recurrent_unit("mamba2", 4, 4 * 2000)
    with torch.no_grad():
        unit.reset_parameters()
    rate, step = torch.exp(unit.log_rate), softplus(unit.step_bias)
    assert 1 <= rate.min() <= rate.max() <= 16 and rate.mean().item() == pytest.approx(8.5, rel=0.03)
    assert 0.000999 <= step.min() <= step.max() <= 0.1001
    assert torch.log(step).mean().item() == pytest.approx(math.log(0.01), rel=0.03)
    assert (unit.skip_weight == 1).all()


def radius_of(unit):
    if isinstance(unit, RGLRU):
        return torch.exp(-softplus(unit.recurrent_param))
    return torch.exp(-torch.exp(unit.nu))


@pytest.mark.parametrize("name", [n for n in UNITS if n == "rg_lru" or (n != "lru" and hasattr(initialised(n), "nu"))])
def test_ring_initialisation(name):
    torch.manual_seed(0)
    unit = build_recurrent_unit(name, 2000, 2000) if name == "rg_lru" else build_recurrent_unit(name, 4, 3000)
    with torch.no_grad():
        unit.reset_parameters()
    radius = radius_of(unit)
    assert radius.min() >= RING_RADIUS[0] - 1e-4
    assert radius.max() <= RING_RADIUS[1] + 1e-4
    # Uniform in the squared radius, so that the ring's area is covered evenly.
    assert abs(radius.square().mean().item() - (0.9**2 + 0.999**2) / 2) < 0.005


@pytest.mark.parametrize("name", ["glru", "rg_lru", "real_lru"])
def test_signed_ring_initialisation(name):
    torch.manual_seed(0)
    unit = build_recurrent_unit(name, 64, 64, allow_negative_eigenvalues=True)
    with torch.no_grad():
        unit.reset_parameters()
    eigenvalue = 2 * radius_of(unit) - 1
    assert RING_RADIUS[0] - 1e-4 <= eigenvalue.abs().min() <= eigenvalue.abs().max() <= RING_RADIUS[1] + 1e-4
    assert (eigenvalue < 0).sum() == 32


@pytest.mark.parametrize("name", REAL_UNITS)
def test_negative_eigenvalues_are_twice_the_decay_less_one(name):
    plain, signed = initialised(name), initialised(name, allow_negative_eigenvalues=True)
    signed.load_state_dict(plain.state_dict())
    inputs = torch.randn(2, STEPS, WIDTH, dtype=torch.float64)
    a, _ = plain.coefficients(*plain.project(inputs))
    signed_a, signed_b = signed.coefficients(*signed.project(inputs))
    torch.testing.assert_close(signed_a, 2 * a - 1, rtol=0, atol=1e-14)
    if name in ("glru", "rg_lru"):
        gain = torch.sqrt(1 - signed_a**2)
        expected = gain * (
            signed.input_gate(inputs) * signed.input_projection(inputs)
            if name == "glru"
            else torch.sigmoid(signed.input_gate(inputs)) * inputs
        )
        torch.testing.assert_close(signed_b, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [-200.0, -40.0, 0.0, 40.0, 200.0])
@pytest.mark.parametrize("signed", [False, True], ids=["positive", "signed"])
@pytest.mark.parametrize("name", REAL_UNITS)
def test_extreme_gates_give_finite_states_and_gradients(name, signed, gate, dtype):
    unit = build_recurrent_unit(name, 4, 4, allow_negative_eigenvalues=signed)
    with torch.no_grad():
        unit.reset_parameters()
    unit = unit.to(dtype)
    widths = [projection.shape[-1] for projection in unit.project(torch.zeros(1, 1, 4, dtype=dtype))]
    for gated in range(len(widths)):
        values = [gate if number == gated else 1.0 for number in range(len(widths))]
        projections = [
            torch.full((1, 8, width), value, dtype=dtype, requires_grad=True)
            for width, value in zip(widths, values, strict=True)
        ]
        a, b = unit.coefficients(*projections)
        (a.sum() + b.sum()).backward()
        for tensor in (a, b, *(p.grad for p in projections if p.grad is not None)):
            assert torch.isfinite(tensor).all()


def test_input_normalizer_is_exact_near_one():
    log_decay = -torch.logspace(-10, 0, 50, dtype=torch.float64)
    expected = torch.sqrt(-torch.expm1(2 * log_decay))
    torch.testing.assert_close(input_normalizer(log_decay.float()).double(), expected, rtol=1e-5, atol=0)


def test_lower_bounds_rise_with_depth():
    model = tiny_model("memora+hgrn", num_hidden_layers=3)
    bounds = []
    for index, layer in enumerate(model.model.layers):
        unit = layer.recurrent_block.recurrent_unit
        assert isinstance(unit, HGRN)
        assert unit.layer_index == index
        with torch.no_grad():
            unit.lower_bound.normal_(std=5)
        closed = torch.full((24,), -1e4), torch.zeros(24)
        bounds.append(unit.coefficients(*closed)[0].detach())
    assert (bounds[0] <= bounds[1]).all()
    assert (bounds[1] <= bounds[2]).all()
    assert bounds[0].min() < 0.1
    assert bounds[2].max() > 0.9


def test_biases_start_at_zero():
    unit = build_recurrent_unit("mingru", 6, 4, bias=True)
    assert [tuple(p.shape) for p in unit.parameters()] == [(4, 6), (4,), (4, 6), (4,)]


@pytest.mark.parametrize(
    ("unit", "parameters"),
    [("glru", 239_360), ("mingru", 206_080), ("real_lru", 304_896), ("complex_lru", 304_896)],
)
def test_parameters_of_selective_copying(unit, parameters):
    config = config_from_preset("memora-selective-copying", vocab_size=16, recurrent_unit=unit)
    assert MemoraForCausalLM(config).num_parameters() == parameters


@pytest.mark.sampled(3)
@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_saves_loads_and_learns(unit, tmp_path):
    torch.manual_seed(0)
    model = tiny_model("hawk", recurrent_unit=unit)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    input_ids = torch.randint(256, (2, 12))
    torch.testing.assert_close(model(input_ids).logits, loaded(input_ids).logits)
    optimizer = torch.optim.AdamW(loaded.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = loaded(input_ids, labels=input_ids).loss
        loss.backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in loaded.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_in_bfloat16_keeps_a_float32_state(unit):
    model = tiny_model("hawk", torch.bfloat16, recurrent_unit=unit)
    output = model(torch.randint(256, (2, 12)))
    assert output.logits.dtype == torch.bfloat16
    assert output.state["layers.0.recurrent"].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        output = tiny_model("hawk", recurrent_unit=unit)(torch.randint(256, (2, 12)))
    assert output.state["layers.0.recurrent"].dtype == torch.float32


def test_what_a_block_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"'lstm'.*glru"):
        build_recurrent_unit("lstm", 4, 4)
    with pytest.raises(ValueError, match=r"rg_lru.*4.*6"):
        build_recurrent_unit("rg_lru", 4, 6)
    with pytest.raises(ValueError, match=r"`state_size` is 7.*multiple of 2"):
        build_recurrent_unit("complex_lru", 4, 7)
    with pytest.raises(ValueError, match=r"`state_size` is 6; ComplexGLRUConjugate needs a multiple of 4"):
        build_recurrent_unit("complex_glru_conjugate", 4, 6)
    with pytest.raises(ValueError, match=r"`allow_negative_eigenvalues` is True.*ComplexGLRU"):
        MemoraForCausalLM(tiny_config("memora", recurrent_unit="complex_glru", allow_negative_eigenvalues=True))
    with pytest.raises(ValueError, match=r"`allow_negative_eigenvalues` is True.*IndRNN"):
        build_recurrent_unit("indrnn", 4, 4, allow_negative_eigenvalues=True)


def test_phases_cover_the_circle_or_its_upper_half():
    torch.manual_seed(0)
    for name, largest in (("complex_glru", 2 * math.pi), ("complex_glru_conjugate", math.pi)):
        unit = build_recurrent_unit(name, 4, 8000)
        with torch.no_grad():
            unit.reset_parameters()
        assert 0 <= unit.theta.min() < 0.01
        assert largest - 0.01 < unit.theta.max() <= largest


def test_glru_is_the_default_of_memora():
    assert type(tiny_model("memora").model.layers[0].recurrent_block.recurrent_unit) is GLRU
