"""The convolution with taps at positions against loops from its equations, torch's own, and finite differences."""

import math

import pytest
import torch
from model_cases import relative_difference

from hf_recurrent.modeling.mgrade.delay_convolution import DelayConvolution, causal_convolution

H, T = 3, 21

# Positions, receptive field, options. Few lags are added, many are convolved by Fourier transforms.
CASES = {
    "constant": ([0, 3, 6], 6, {}),
    "one tap": ([0], 0, {}),
    "many taps": (list(range(30)), 29, {}),
    "field wider than the taps": ([0, 5], 9, {}),
    "learned": ([0, 3, 6], 8, {"learned": True}),
    "learned, far": ([0, 9, 18, 27], 36, {"learned": True, "uniform": True}),
    "learned, wide": ([0, 10, 20], 30, {"learned": True, "interpolation_width": 2.5}),
    "learned, Γ = 0": ([0], 0, {"learned": True}),
}
each_case = pytest.mark.parametrize("case", CASES)


def convolution(case: str, dtype: torch.dtype = torch.float64) -> DelayConvolution:
    positions, receptive_field, options = CASES[case]
    module = DelayConvolution(H, positions, receptive_field, **options)
    torch.manual_seed(0)
    module.reset_parameters()
    if module.learned:
        with torch.no_grad():
            module.positions.add_(torch.rand_like(module.positions) - 0.5)
    return module.to(dtype)


def example(module, batch: int = 4, steps: int = T, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    inputs = torch.randn(batch, steps, H, **options)
    buffer = torch.randn(batch, module.receptive_field, H, **options)
    reset_mask = torch.rand(batch, steps, generator=generator) < torch.tensor([0.0, 0.1, 0.3, 1.0]).view(-1, 1)[:batch]
    return inputs, buffer, reset_mask


def equation(module, inputs, buffer, reset_mask, lengths=None):
    """y_t = Σ_n k_n x_{t-n} within the episode, and the last Γ inputs of it: equations 1, 5 and 8 in loops."""
    gamma, steps = module.receptive_field, inputs.shape[1]
    kernel = torch.zeros(gamma + 1, H, dtype=torch.float64)
    for tap, start in enumerate(module.initial_positions):
        for channel in range(H):
            for n in range(gamma + 1):
                if module.learned:
                    position = min(max(module.positions[tap, channel].item(), 0), gamma)
                    c = math.exp(-0.5 * ((n - position) / module.interpolation_width) ** 2)
                else:
                    c = float(n == start)
                kernel[n, channel] += module.weight[tap, channel].item() * c
    outputs, last = torch.zeros_like(inputs), torch.zeros_like(buffer)
    for row in range(len(inputs)):
        episode = list(buffer[row])
        for t in range(steps if lengths is None else lengths[row]):
            if reset_mask[row, t]:
                episode = []
            episode.append(inputs[row, t])
            for n in range(min(gamma, len(episode) - 1) + 1):
                outputs[row, t] += kernel[n] * episode[-1 - n]
        for back, value in enumerate(reversed(episode[-gamma:] if gamma else [])):
            last[row, gamma - 1 - back] = value
    return outputs, last


@each_case
@pytest.mark.parametrize("steps", [1, 2, T, 64])
def test_is_its_equation(case, steps):
    module = convolution(case)
    inputs, buffer, reset_mask = example(module, steps=steps)
    before = buffer.clone()
    for mask in (reset_mask, torch.zeros_like(reset_mask), None):
        expected = equation(module, inputs, buffer, torch.zeros_like(reset_mask) if mask is None else mask)
        actual = module(inputs, buffer, mask)
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-11, atol=1e-11)
        assert torch.equal(actual[1], expected[1])
    assert torch.equal(buffer, before), "the state that was given stays as it was"


@each_case
def test_padding_behind_a_row_leaves_no_trace(case):
    module = convolution(case)
    inputs, buffer, reset_mask = example(module)
    lengths = torch.tensor([T, 0, 7, 1])
    reset_mask &= torch.arange(T) < lengths.unsqueeze(1)
    expected = equation(module, inputs, buffer, reset_mask, lengths)
    outputs, last = module(inputs, buffer, reset_mask, lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(outputs[row, :length], expected[0][row, :length], rtol=1e-11, atol=1e-11)
    assert torch.equal(last, expected[1])


@each_case
def test_gradients_do_not_depend_on_the_cut(case):
    module = convolution(case)
    inputs, buffer, reset_mask = example(module, steps=48)
    inputs.requires_grad_()
    gradients = []
    for size in (48, 13, 1):
        outputs, carried = [], buffer.clone().requires_grad_()
        leaf = carried
        for start in range(0, 48, size):
            part = slice(start, start + size)
            output, carried = module(inputs[:, part], carried, reset_mask[:, part])
            outputs.append(output)
        loss = (torch.cat(outputs, 1) ** 2).sum() + (carried**3).sum()
        gradients.append(torch.autograd.grad(loss, [inputs, leaf, *module.parameters()]))
    for other in gradients[1:]:
        for actual, expected in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dilation", [1, 2, 5])
def test_fixed_positions_are_a_dilated_convolution_of_torch(dilation):
    module = DelayConvolution(H, [dilation * tap for tap in range(4)], 3 * dilation).double()
    torch.manual_seed(0)
    module.reset_parameters()
    inputs, buffer, _ = example(module)
    padded = torch.cat([buffer, inputs], 1).transpose(1, 2)
    expected = torch.nn.functional.conv1d(padded, module.weight.flip(0).t()[:, None], dilation=dilation, groups=H)
    torch.testing.assert_close(module(inputs, buffer)[0], expected.transpose(1, 2))


@pytest.mark.parametrize("case", ["learned", "learned, far", "learned, wide"])
@pytest.mark.parametrize("steps", [1, 12])
def test_gradients_of_positions_are_those_of_finite_differences(case, steps):
    module = convolution(case)
    with torch.no_grad():
        module.positions.clamp_(0.3, module.receptive_field - 0.3)
    inputs, buffer, reset_mask = example(module, batch=2, steps=steps)

    def run(positions, weight, inputs, buffer):
        values = {"positions": positions, "weight": weight}
        return torch.func.functional_call(module, values, (inputs, buffer, reset_mask))

    leaves = [t.detach().clone().requires_grad_() for t in (module.positions, module.weight, inputs, buffer)]
    assert torch.autograd.gradcheck(run, leaves)


def test_positions_are_clipped_and_find_their_way_back():
    module = DelayConvolution(1, [0, 2, 4], 4, learned=True).double()
    module.reset_parameters()
    (inside,) = torch.autograd.grad((module.kernel() ** 2).sum(), module.positions)
    border = module.kernel()
    with torch.no_grad():
        module.positions.copy_(torch.tensor([[-3.0], [2.0], [9.0]]))
    torch.testing.assert_close(module.kernel(), border)
    (outside,) = torch.autograd.grad((module.kernel() ** 2).sum(), module.positions)
    torch.testing.assert_close(outside, inside)
    assert (outside.abs() > 1e-3)[[0, 2]].all()


def test_a_delay_is_learned():
    torch.manual_seed(0)
    module = DelayConvolution(1, [0, 4], 8, learned=True).double()
    module.reset_parameters()
    inputs = torch.randn(4, 200, 1, dtype=torch.float64)
    target = torch.nn.functional.pad(inputs, (0, 0, 5, 0))[:, :200]
    buffer = torch.zeros(4, 8, 1, dtype=torch.float64)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.03)
    for _ in range(200):
        loss = torch.nn.functional.mse_loss(module(inputs, buffer)[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert module.positions[1].item() == pytest.approx(5, abs=0.1)


def test_a_step_reads_nothing_but_its_taps():
    module = convolution("constant")
    inputs, buffer, _ = example(module, steps=1)
    poisoned = buffer.clone()
    unread = [place for place in range(6) if 6 - place not in (3, 6)]
    poisoned[:, unread] = torch.nan
    assert torch.equal(module(inputs, poisoned)[0], module(inputs, buffer)[0])


@pytest.mark.parametrize("steps", [1, 5, 100])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_the_buffer_holds_its_floats_and_no_block_in_the_background(steps, with_lengths):
    module = convolution("learned, far", torch.float32)
    inputs, buffer, _ = example(module, batch=1, steps=steps)
    lengths = torch.tensor([steps]) if with_lengths else None
    _, last = module(inputs.float(), buffer.float(), None, lengths)
    assert last.untyped_storage().nbytes() == 4 * 36 * H


def test_transforms_do_not_drown_small_values():
    # In float32 a transform rounds relative to the largest value, here 1e4.
    signal = torch.full((1, 60, 1), 1e-3)
    signal[0, 0] = 1e4
    kernel = torch.zeros(41, 1)
    kernel[40] = 1.0
    outputs = causal_convolution(signal, kernel)
    assert outputs[0, :40].abs().max() < 1e-10
    assert relative_difference(outputs[0, 41:], signal[0, 1:20]) < 1e-5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", ["learned, far", "many taps", "learned"])
def test_compiles_as_one_graph_with_resets(case):
    module = convolution(case)
    inputs, buffer, reset_mask = example(module)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for mask in (reset_mask, None):
        for actual, expected in zip(compiled(inputs, buffer, mask), module(inputs, buffer, mask), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_initialisation():
    torch.manual_seed(0)
    dilated = DelayConvolution(500, [0, 8, 16, 24], 32, learned=True)
    dilated.reset_parameters()
    assert torch.equal(dilated.positions, torch.tensor([0.0, 8, 16, 24]).unsqueeze(1).expand(4, 500))
    assert dilated.weight.std().item() == pytest.approx(0.5, rel=0.05)
    uniform = DelayConvolution(500, [0, 8, 16, 24], 32, learned=True, uniform=True)
    uniform.reset_parameters()
    assert uniform.positions.min() >= 0
    assert uniform.positions.max() <= 32
    assert uniform.positions.mean().item() == pytest.approx(16, abs=1)
