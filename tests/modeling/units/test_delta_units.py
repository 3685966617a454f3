"""Units of the delta rule: chunks against single steps, in float64, and against the layer of transformers."""

import pytest
import torch
from torch import nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from hf_recurrent.modeling.units import delta_units
from hf_recurrent.modeling.units.delta_units import CHUNK_STEPS, GatedDelta
from hf_recurrent.modeling.units.recurrent_units import build_recurrent_unit

NAMES = ("gated_delta", "rwkv7")
WIDTH, STEPS = 8, 2 * CHUNK_STEPS + 5


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch):
    monkeypatch.setattr(delta_units, "SHORTEST_IN_CHUNKS", CHUNK_STEPS)


def built(name, **options):
    torch.manual_seed(2)
    unit = build_recurrent_unit(name, WIDTH, WIDTH, **options).double()
    with torch.no_grad():
        unit.reset_parameters()
        for parameter in unit.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return unit


def run(unit, inputs, state, cuts, reset, padding):
    """Outputs and last state of a block that is cut at `cuts`."""
    outputs = []
    for part in zip(*(tensor.tensor_split(cuts, 1) for tensor in (inputs, reset, padding)), strict=True):
        output, state = unit(part[0], state, *part[1:])
        outputs.append(output)
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("options", [{}, {"allow_negative_eigenvalues": True}], ids=["plain", "negative"])
@pytest.mark.parametrize("name", NAMES)
def test_a_block_is_its_chunks_and_its_steps(name, options):
    if name == "rwkv7" and options:
        with pytest.raises(ValueError, match="`allow_negative_eigenvalues` is True, but RWKV7"):
            build_recurrent_unit(name, WIDTH, WIDTH, **options)
        return
    unit = built(name, **options)
    inputs = torch.randn(3, STEPS, WIDTH, dtype=torch.float64, requires_grad=True)
    start = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    reset, padding = torch.rand(2, 3, STEPS) < 0.15
    weights = torch.randn(3, STEPS, unit.output_size, dtype=torch.float64)
    found = []
    for cuts in ([], [20], [7, 30], list(range(1, STEPS))):
        outputs, final = run(unit, inputs, start, cuts, reset, padding)
        loss = (outputs * weights).masked_fill(padding[..., None], 0).sum() + final.square().sum()
        gradients = torch.autograd.grad(loss, [inputs, start, *unit.parameters()])
        found.append((outputs.masked_fill(padding[..., None], 0), final, *gradients))
    for other in found[:-1]:
        for actual, expected in zip(other, found[-1], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_chunks(name):
    unit = built(name)
    inputs = torch.randn(1, CHUNK_STEPS + 3, WIDTH, dtype=torch.float64, requires_grad=True)
    start = torch.randn(1, WIDTH, dtype=torch.float64, requires_grad=True)
    reset = torch.zeros(1, CHUNK_STEPS + 3, dtype=torch.bool)
    reset[0, 5] = True
    names = list(dict(unit.named_parameters()))

    def forward(inputs, start, *parameters):
        return torch.func.functional_call(unit, dict(zip(names, parameters, strict=True)), (inputs, start, reset))

    torch.autograd.gradcheck(forward, (inputs, start, *unit.parameters()), fast_mode=True)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_inputs_give_finite_states_and_gradients(name):
    unit = built(name).float()
    for scale in (0.0, 300.0):
        inputs = (scale * torch.randn(2, STEPS, WIDTH)).requires_grad_()
        outputs, final = unit(inputs, torch.zeros(2, WIDTH))
        (outputs.sum() + final.sum()).backward()
        assert outputs.isfinite().all() and final.isfinite().all() and inputs.grad.isfinite().all()


class WithoutGate(nn.Module):
    def forward(self, hidden_states, gate):
        return hidden_states


class Wide(GatedDelta):
    state_per_output = 16


def by_head(weight, numbers):
    """Rows of a map to (K, G) numbers in the order (G, K)."""
    return weight.view(numbers, -1, WIDTH).transpose(0, 1)


@pytest.mark.parametrize("unit_class", [GatedDelta, Wide])
def test_gated_delta_is_that_of_qwen3_next(unit_class, monkeypatch):
    """Their layer with values of one channel, without its convolution, gated norm and map out."""
    numbers, heads = unit_class.state_per_output, 6
    ours = unit_class(WIDTH, numbers * heads)
    sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_value_head_dim": 1}
    theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=WIDTH, linear_key_head_dim=numbers, **sizes), 0)
    theirs.norm, theirs.out_proj = WithoutGate(), nn.Identity()
    with torch.no_grad():
        for weight in ours.parameters():
            nn.init.normal_(weight, std=0.5)
        query, key = by_head(ours.query.weight, numbers), by_head(ours.key.weight, numbers)
        value, gate = ours.input_projection.weight.view(heads, 1, WIDTH), torch.zeros(heads, 1, WIDTH)
        theirs.in_proj_qkvz.weight.copy_(torch.cat([query, key, value, gate], 1).flatten(0, 1))
        pairs = torch.stack([ours.write_gate.weight, ours.step_size.weight], 1)
        theirs.in_proj_ba.weight.copy_(pairs.flatten(0, 1))
        theirs.conv1d.weight.zero_()[..., -1] = 1
        theirs.A_log.copy_(ours.log_rate)
        theirs.dt_bias.copy_(ours.step_bias)
    inputs = torch.randn(3, STEPS, WIDTH)
    actual, final = ours(inputs, torch.zeros(3, numbers * heads))
    torch.testing.assert_close(actual, theirs.eval()(inputs), rtol=1e-4, atol=1e-5)
    states = []
    recurrent = modeling_qwen3_next.torch_recurrent_gated_delta_rule

    def step_by_step(*args, **options):
        output, state = recurrent(*args, **{**options, "output_final_state": True})
        states.append(state)
        return output, state

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", step_by_step)
    torch.testing.assert_close(actual, theirs(inputs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        final.view(3, numbers, heads), states[0].squeeze(-1).transpose(1, 2), rtol=1e-4, atol=1e-5
    )
