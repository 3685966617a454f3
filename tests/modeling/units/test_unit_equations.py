"""The units against loops written from their equations in float64, and against classes of other libraries."""

import pytest
import torch
from torch.nn.functional import gelu, logsigmoid, silu, softplus
from transformers import Mamba2Config, RecurrentGemmaConfig
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from unit_cases import STEPS, UNITS, WIDTH, initialised

from hf_recurrent.modeling.units.recurrent_units import build_recurrent_unit

# One step of every unit as its paper writes it: (unit, x (S), h (S, complex where the unit is)) → (h, output).


def glru_step(u, x, h):
    r = torch.exp(-3 * torch.exp(u.nu) * torch.sigmoid(u.recurrence_gate(x)))
    h = r * h + torch.sqrt(1 - r**2) * u.input_gate(x) * u.input_projection(x)
    return h, h


def rg_lru_step(u, x, h):
    r = torch.exp(-8 * softplus(u.recurrent_param) * torch.sigmoid(u.recurrence_gate(x)))
    h = r * h + torch.sqrt(1 - r**2) * torch.sigmoid(u.input_gate(x)) * x
    return h, h


def mingru_step(u, x, h):
    z = torch.sigmoid(u.update_gate(x))
    h = (1 - z) * h + z * u.candidate(x)
    return h, h


def minlstm_step(u, x, h):
    f, i = torch.sigmoid(u.forget_gate(x)), torch.sigmoid(u.input_gate(x))
    h = f / (f + i) * h + i / (f + i) * u.candidate(x)
    return h, h


def hgrn_step(u, x, h):
    bound = (u.layer_index + torch.sigmoid(u.lower_bound)) / u.num_layers
    f = bound + (1 - bound) * torch.sigmoid(u.forget_gate(x))
    h = f * h + (1 - f) * silu(u.candidate(x))
    return h, h


def qrnn_step(u, x, c):
    f = torch.sigmoid(u.forget_gate(x))
    c = f * c + (1 - f) * torch.tanh(u.candidate(x))
    return c, torch.sigmoid(u.output_gate(x)) * c


def real_lru_step(u, x, h):
    r = torch.exp(-torch.exp(u.nu))
    h = r * h + torch.sqrt(1 - r**2) * u.input_projection(x)
    return h, u.state_read_out.weight @ h


def leaky_step(u, x, h):
    a = torch.exp(-torch.exp(u.rate))
    h = a * h + (1 - a) * u.input_projection(x)
    return h, h


def as_complex(numbers):
    return torch.complex(*numbers.chunk(2))


def paired(numbers):
    return torch.cat([numbers, numbers.conj()])


def complex_glru_step(u, x, h, pairs=lambda numbers: numbers):
    r = torch.exp(-3 * torch.exp(u.nu) * torch.sigmoid(u.recurrence_gate(x)))
    eigenvalue = pairs(r * torch.exp(1j * u.theta))
    gamma = torch.sqrt(1 - eigenvalue.abs() ** 2)
    h = eigenvalue * h + gamma * as_complex(u.input_gate(x)) * as_complex(u.input_projection(x))
    return h, torch.cat([h.real, h.imag])


def complex_glru_conjugate_step(u, x, h):
    return complex_glru_step(u, x, h, paired)


def real_part_of_readout(u, h):
    """Re(C h) with the complex C whose parts the real map holds."""
    real, imaginary = u.state_read_out.weight.chunk(2, 1)
    return (torch.complex(real, -imaginary) @ h).real


def complex_glru_read_out_step(u, x, h, pairs=lambda numbers: numbers):
    h, _ = complex_glru_step(u, x, h, pairs)
    return h, real_part_of_readout(u, h)


def complex_glru_conjugate_read_out_step(u, x, h):
    return complex_glru_read_out_step(u, x, h, paired)


def gateloop_step(u, x, h):
    h = torch.sigmoid(u.amplitude(x)) * torch.exp(1j * u.phase(x)) * h + u.key(x) * u.value(x)
    # q = q_R - i q_I: the sum of both halves is Re(q h).
    return h, u.query(x) * torch.cat([h.real, h.imag])


def complex_lru_step(u, x, h, pairs=lambda numbers: numbers):
    eigenvalue = pairs(torch.exp(-torch.exp(u.nu) + 1j * torch.exp(u.theta)))
    h = eigenvalue * h + torch.sqrt(1 - eigenvalue.abs() ** 2) * as_complex(u.input_projection(x))
    return h, real_part_of_readout(u, h)


def complex_lru_conjugate_step(u, x, h):
    return complex_lru_step(u, x, h, paired)


def s5_step(u, x, h):
    a = -torch.exp(u.log_rate) + 1j * u.frequency
    eigenvalue = torch.exp(torch.exp(u.log_step) * a)
    h = eigenvalue * h + (eigenvalue - 1) / a * as_complex(u.input_projection(x))
    return h, real_part_of_readout(u, h)


def held(rate, frequency, step):
    """λ and (λ - 1) / A of a state space."""
    a = -rate + 1j * frequency
    eigenvalue = torch.exp(step * a)
    return eigenvalue, (eigenvalue - 1) / a


def gss_step(u, x, h):
    narrow = gelu(u.input_projection(x))
    eigenvalue, gain = held(torch.exp(u.log_rate), torch.exp(u.log_frequency), 1)
    h = eigenvalue * h + gain * torch.cat([narrow, narrow])
    real, imaginary = u.state_weight.chunk(2)
    product = (torch.complex(real, -imaginary) * h).real
    return h, u.expansion(product[: u.channels] + product[u.channels :] + u.skip_weight * narrow)


def h3_step(u, x, state):
    taps, h = state.chunk(2)
    key, value = u.key(x), u.value(x)
    shifted = u.shift_weight.unflatten(0, (2, -1))
    product = (shifted[0] * key + shifted[1] * taps.real) * value
    eigenvalue, gain = held(torch.exp(u.log_rate), u.frequency, torch.exp(u.log_step))
    h = eigenvalue * h + gain * product
    real, imaginary = u.state_weight.chunk(2)
    output = u.query(x) * ((torch.complex(real, -imaginary) * h).real + u.skip_weight * product)
    return torch.cat([torch.complex(key, taps.real), h]), output


def mamba2_step(u, x, h):
    step = softplus(u.step_size(x) + u.step_bias)
    value, key, query = silu(u.input_projection(x)), silu(u.key(x)).view(4, -1), silu(u.query(x)).view(4, -1)
    h = torch.exp(-step * torch.exp(u.log_rate)) * h.view(4, -1) + step * value * key
    return h.flatten(), (query * h).sum(0) + u.skip_weight * value


def indrnn_step(u, x, h):
    h = torch.tanh(u.input_projection(x) + u.recurrent_weight * h)
    return h, h


def sru_step(u, x, state):
    c, _ = state.chunk(2)
    f = torch.sigmoid(u.forget_gate(x) + u.forget_weight * c)
    r = torch.sigmoid(u.reset_gate(x) + u.reset_weight * c)
    c = f * c + (1 - f) * u.candidate(x)
    return torch.cat([c, r]), r * c + (1 - r) * u.skip(x)


def elstm_step(u, x, c):
    f = torch.sigmoid(u.forget_gate(x) + u.forget_weight * c)
    c = f * c + (1 - f) * torch.tanh(u.candidate(x) + u.candidate_weight * c)
    return c, torch.sigmoid(u.output_gate(x) + u.state_read_out.weight @ c) * c


def slstm_step(u, x, state):
    """With the stabiliser as the paper has it, m = -inf before the first step of an episode."""
    c, n, m, h = state.chunk(4)
    m = torch.where(n == 0, -torch.inf, m)
    log_i, log_f = u.input_gate(x) + u.input_weight * h, logsigmoid(u.forget_gate(x) + u.forget_weight * h)
    last, m = m, torch.maximum(log_f + m, log_i)
    f, i = torch.exp(log_f + last - m), torch.exp(log_i - m)
    c = f * c + i * torch.tanh(u.candidate(x) + u.candidate_weight * h)
    n = f * n + i
    h = torch.sigmoid(u.output_gate(x) + u.output_weight * h) * c / n
    return torch.cat([c, n, m, h]), h


def lru_step(u, x, h):
    eigenvalue = torch.exp(-torch.exp(u.nu) + 1j * torch.exp(u.theta))
    h = eigenvalue * h + torch.exp(u.log_gamma) * as_complex(u.input_projection(x))
    return h, torch.cat([h.real, h.imag])


def gru_step(u, x, h):
    r = torch.sigmoid(u.reset_gate(x) + u.recurrent_reset_gate.weight @ h)
    z = torch.sigmoid(u.update_gate(x) + u.recurrent_update_gate.weight @ h)
    n = torch.tanh(u.candidate(x) + r * (u.recurrent_candidate.weight @ h))
    h = (1 - z) * n + z * h
    return h, h


def dense_linear_step(u, x, h):
    h = u.recurrent_map.weight @ h + u.input_projection(x)
    return h, h


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_its_equation(name):
    unit, step = initialised(name, layer_index=1, num_layers=4), globals()[f"{name}_step"]
    inputs = torch.randn(2, STEPS, WIDTH, dtype=torch.float64)
    reset = torch.rand(2, STEPS) < 0.3
    start = torch.randn(2, WIDTH, dtype=torch.float64)
    outputs, final = unit(inputs, start, reset)
    for row in range(2):
        h = start[row] if unit.has_real_eigenvalues else as_complex(start[row])
        for t in range(STEPS):
            h, output = step(unit, inputs[row, t], torch.zeros_like(h) if reset[row, t] else h)
            torch.testing.assert_close(outputs[row, t], output, rtol=1e-12, atol=1e-12)
        last = h if unit.has_real_eigenvalues else torch.cat([h.real, h.imag])
        torch.testing.assert_close(final[row], last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", UNITS)
def test_derivatives(name):
    unit = initialised(name)
    inputs = torch.randn(1, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    start = torch.randn(1, WIDTH, dtype=torch.float64, requires_grad=True)
    reset = torch.tensor([[False, False, True, False]])
    names = list(dict(unit.named_parameters()))

    def run(inputs, start, *parameters):
        return torch.func.functional_call(unit, dict(zip(names, parameters, strict=True)), (inputs, start, reset))

    torch.autograd.gradcheck(run, (inputs, start, *unit.parameters()), fast_mode=True)


def test_rg_lru_is_that_of_recurrent_gemma():
    ours = initialised("rg_lru", torch.float32)
    theirs = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=WIDTH, num_attention_heads=1, hidden_size=WIDTH))
    with torch.no_grad():
        theirs.recurrent_param.copy_(ours.recurrent_param)
        theirs.input_gate_weight.copy_(ours.input_gate.weight.T[None])
        theirs.recurrent_gate_weight.copy_(ours.recurrence_gate.weight.T[None])
        theirs.input_gate_bias.zero_()
        theirs.recurrent_gate_bias.zero_()
    inputs = torch.randn(3, 20, WIDTH)
    # From position 1 on: position 0 is special in that class.
    expected = theirs(inputs, torch.arange(1, 21).expand(3, -1))
    actual, final = ours(inputs, torch.zeros(3, WIDTH))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(final, theirs.recurrent_states, rtol=1e-6, atol=1e-6)


class WithoutGate(torch.nn.Module):
    def forward(self, hidden_states, gate):
        return hidden_states


def test_mamba2_is_that_of_transformers():
    """Their mixer with heads of one channel, without its convolution, gated norm and map out."""
    ours = build_recurrent_unit("mamba2", WIDTH, 4 * WIDTH)
    sizes = {"num_heads": WIDTH, "head_dim": 1, "n_groups": WIDTH, "state_size": 4, "expand": 1, "chunk_size": 8}
    theirs = Mamba2Mixer(Mamba2Config(hidden_size=WIDTH, use_conv_bias=False, **sizes), layer_idx=0)
    theirs.norm, theirs.out_proj = WithoutGate(), torch.nn.Identity()

    def by_head(weight):
        return weight.view(4, WIDTH, WIDTH).transpose(0, 1).flatten(0, 1)

    with torch.no_grad():
        for weight in ours.parameters():
            torch.nn.init.normal_(weight, std=0.5)
        maps = (
            ours.input_projection.weight,
            by_head(ours.key.weight),
            by_head(ours.query.weight),
            ours.step_size.weight,
        )
        theirs.in_proj.weight.copy_(torch.cat([torch.zeros(WIDTH, WIDTH), *maps]))
        theirs.conv1d.weight.zero_()[..., -1] = 1
        for name, vector in (("A_log", ours.log_rate), ("dt_bias", ours.step_bias), ("D", ours.skip_weight)):
            getattr(theirs, name).copy_(vector)
    inputs = torch.randn(3, 20, WIDTH)
    actual, _ = ours(inputs, torch.zeros(3, 4 * WIDTH))
    torch.testing.assert_close(actual, theirs.eval()(inputs), rtol=1e-5, atol=1e-5)


def test_gru_is_that_of_torch():
    ours, theirs = initialised("gru", torch.float32, bias=True), torch.nn.GRU(WIDTH, WIDTH, batch_first=True)
    with torch.no_grad():
        maps = (ours.reset_gate, ours.update_gate, ours.candidate)
        theirs.weight_ih_l0.copy_(torch.cat([linear.weight for linear in maps]))
        theirs.bias_ih_l0.copy_(torch.cat([linear.bias for linear in maps]))
        theirs.weight_hh_l0.copy_(torch.cat([linear.weight for linear in ours.state_maps]))
        # Torch adds a second bias to the sums inside both gates.
        theirs.bias_hh_l0.copy_(torch.cat([torch.zeros(2 * WIDTH), ours.recurrent_candidate.bias]))
    inputs, start = torch.randn(3, 20, WIDTH), torch.randn(3, WIDTH)
    expected, last = theirs(inputs, start[None])
    actual, final = ours(inputs, start)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(final, last[0], rtol=1e-5, atol=1e-6)
