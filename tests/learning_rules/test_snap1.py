"""SnAp-1 against its definition, in float64: one sensitivity a weight, propagated by the Jacobian's diagonal."""

import pytest
import torch
from model_cases import relative_difference
from test_sensitivities import BEFORE, ELEMENT_WISE, UnitAlone, gradients, loss_of, model_of
from test_sensitivities import batch as model_batch

from hf_recurrent import gradient_alignment
from hf_recurrent.learning_rules.rules import build_learning_rule, diagonal_recurrence
from hf_recurrent.modeling.block.recurrent_state import detach_state
from hf_recurrent.modeling.units.recurrent_units import build_recurrent_unit

M, S, STEPS = 4, 6, 9
DENSE = ["gru", "dense_linear"]
UNIT = "recurrent_unit"


def random_unit(name):
    torch.manual_seed(3)
    unit = build_recurrent_unit(name, M, S, bias=True)
    for parameter in unit.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return unit.double()


def random_block():
    torch.manual_seed(4)
    inputs, errors = torch.randn(2, STEPS, M).double(), torch.randn(2, STEPS, S).double()
    resets = torch.zeros(2, STEPS, dtype=torch.bool)
    resets[1, 4] = True
    return inputs, errors, resets


# One step as the paper writes it: (unit, x, h) → new h, the diagonal of the Jacobian, and for each parameter what its
# row's number is multiplied by, and with which vector.


def gru_step(u, x, h):
    ur, uz, un = (state_map.weight for state_map in u.state_maps)
    r = torch.sigmoid(u.reset_gate(x) + ur @ h)
    z = torch.sigmoid(u.update_gate(x) + uz @ h)
    a = un @ h + u.recurrent_candidate.bias
    n = torch.tanh(u.candidate(x) + r * a)
    by_n = (1 - z) * (1 - n**2)
    by_r = by_n * a * r * (1 - r)
    by_z = (h - n) * z * (1 - z)
    diagonal = z + by_r * ur.diagonal() + by_z * uz.diagonal() + by_n * r * un.diagonal()
    immediate = {
        "reset_gate.weight": (by_r, x),
        "update_gate.weight": (by_z, x),
        "candidate.weight": (by_n, x),
        "reset_gate.bias": (by_r, None),
        "update_gate.bias": (by_z, None),
        "candidate.bias": (by_n, None),
        "recurrent_reset_gate.weight": (by_r, h),
        "recurrent_update_gate.weight": (by_z, h),
        "recurrent_candidate.weight": (by_n * r, h),
        "recurrent_candidate.bias": (by_n * r, None),
    }
    return (1 - z) * n + z * h, diagonal, immediate


def dense_linear_step(u, x, h):
    a, ones = u.recurrent_map.weight, torch.ones(S, dtype=x.dtype)
    immediate = {
        "recurrent_map.weight": (ones, h),
        "input_projection.weight": (ones, x),
        "input_projection.bias": (ones, None),
    }
    return a @ h + u.input_projection(x), a.diagonal(), immediate


@torch.no_grad()
def by_definition(name, unit, inputs, errors, resets, keep_past=True):
    step, learned = globals()[f"{name}_step"], dict.fromkeys(dict(unit.named_parameters()), 0)
    for row in range(len(inputs)):
        h, traces = torch.zeros(S).double(), dict.fromkeys(learned, 0)
        for t in range(STEPS):
            if resets[row, t]:
                h, traces = torch.zeros(S).double(), dict.fromkeys(learned, 0)
            h, diagonal, immediate = step(unit, inputs[row, t], h)
            for parameter, (factor, vector) in immediate.items():
                now = factor if vector is None else torch.outer(factor, vector)
                past = diagonal if vector is None else diagonal[:, None]
                traces[parameter] = now + (past * traces[parameter] if keep_past else 0)
                error = errors[row, t] if vector is None else errors[row, t][:, None]
                learned[parameter] = learned[parameter] + error * traces[parameter]
    return learned


def learned_in_blocks(unit, rule_name, stride, inputs, errors, resets):
    rule = build_learning_rule(rule_name, UnitAlone(unit))
    state, carried = torch.zeros(2, S).double(), rule.init_carried(2)
    for x, error, reset in zip(*(tensor.split(stride, 1) for tensor in (inputs, errors, resets)), strict=True):
        with rule.block(carried):
            outputs, state = unit(x, state.detach(), reset)
            outputs.mul(error).sum().backward()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in unit.named_parameters()}
    unit.zero_grad()
    return found


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("stride", [1, 4, STEPS])
def test_it_is_the_definition_at_any_stride(name, stride):
    unit = random_unit(name)
    expected = by_definition(name, unit, *random_block())
    learned = learned_in_blocks(unit, "snap1", stride, *random_block())
    through_time = learned_in_blocks(unit, "truncated", STEPS, *random_block())
    for parameter, gradient in expected.items():
        assert relative_difference(learned[parameter], gradient) < 1e-10, parameter
        assert relative_difference(learned[parameter], through_time[parameter]) > 1e-3, parameter
    assert "recur" not in unit.__dict__


@pytest.mark.parametrize("name", DENSE)
def test_spatial_learns_the_maps_of_the_input_at_the_true_states(name):
    unit = random_unit(name)
    expected = by_definition(name, unit, *random_block(), keep_past=False)
    learned = learned_in_blocks(unit, "spatial", STEPS, *random_block())
    one_step = learned_in_blocks(unit, "truncated", 1, *random_block())
    for parameter, gradient in expected.items():
        assert relative_difference(one_step[parameter], gradient) < 1e-10, parameter
        of_state = parameter.startswith("recurrent")
        assert relative_difference(learned[parameter], 0 * gradient if of_state else gradient) < 1e-10, parameter


@pytest.mark.parametrize("name", DENSE)
def test_outputs_are_the_true_ones_also_with_padding(name):
    unit = random_unit(name)
    inputs, _, resets = random_block()
    padding = torch.zeros(2, STEPS, dtype=torch.bool)
    padding[0, 6:] = True
    start = torch.randn(2, S).double()
    expected = unit(inputs, start, resets, padding)
    recur = diagonal_recurrence(unit)
    states, final = recur(unit.project(inputs), start, resets, padding)
    assert torch.equal(states, expected[0])
    assert torch.equal(final, expected[1])
    # A padded step hands the error on as it is.
    weight = next(unit.parameters())
    learned = torch.autograd.grad(final[0].sum(), weight)
    shorter, _ = recur(unit.project(inputs[:, :6]), start, resets[:, :6])
    torch.testing.assert_close(learned, torch.autograd.grad(shorter[0, -1].sum(), weight))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_element_wise_units_learn_exactly(name):
    model = model_of(f"hawk+{name}" if name == "rg_lru" else f"memora+{name}", num_hidden_layers=2)
    found = []
    for rule_name in ("snap1", "rtrl"):
        rule = build_learning_rule(rule_name, model)
        state, carried = model.init_state(3), rule.init_carried(3)
        for part in zip(*(tensor.split(3, 1) for tensor in model_batch()), strict=True):
            with rule.block(carried):
                output = loss_of(model, part, state=state)
                output.loss.backward()
            state = detach_state(output.state)
        found.append(gradients(model))
    for parameter, gradient in found[1].items():
        assert relative_difference(found[0][parameter], gradient) < 1e-10, parameter


def test_a_gru_is_nearer_to_the_truth_than_by_one_step():
    """A dense linear recurrence is not: its diagonal is as small as its other weights (Zucchet et al., Table 1)."""
    cosines = {"snap1": [], "truncated": []}
    for seed in range(3):
        model = model_of("memora+gru")
        torch.manual_seed(seed)
        model.apply(model._initialize_weights)
        for rule, values in cosines.items():
            values += [r.cosine for r in gradient_alignment(model, *model_batch(), rule=rule) if UNIT in r.parameter]
    means = {rule: sum(values) / len(values) for rule, values in cosines.items()}
    assert means["snap1"] > means["truncated"] + 0.02, means


@pytest.mark.parametrize("name", DENSE)
def test_what_stands_behind_the_unit_is_exact(name):
    rows = gradient_alignment(model_of(f"memora+{name}"), *model_batch(), rule="snap1")
    behind = [row for row in rows if not any(part in row.parameter for part in (UNIT, *BEFORE))]
    assert len(behind) > 5 and max(row.max_relative_difference for row in behind) < 1e-10


def test_bfloat16_models_have_float32_sensitivities():
    model = model_of("memora+gru", torch.bfloat16)
    rule = build_learning_rule("snap1", model)
    state, carried = model.init_state(3), rule.init_carried(3)
    for part in zip(*(tensor.split(4, 1) for tensor in model_batch()), strict=True):
        state = rule.learn(carried, state, *part, 36).state
    assert all(tensor.dtype == torch.float32 and tensor.any() for tensor in carried.values())
