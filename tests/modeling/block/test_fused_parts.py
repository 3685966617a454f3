"""Parts of a layer in compiled kernels against the modules that they stand for."""

import pytest
import torch
from torch import nn

from hf_recurrent.modeling.block.linear_maps import linear_maps, rounded_products
from hf_recurrent.modeling.block.recurrent_blocks import gated_gelu, rms_norm
from hf_recurrent.modeling.block.training_kernels import training_kernels, training_module

pytestmark = pytest.mark.skipif(training_module() is None, reason="the kernel was not built")
ROWS, WIDTH = (8, 40), 48  # more elements than SMALLEST_FUSED


def random_inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def results(outputs, inputs, parameters):
    """Outputs and gradients of a function of them that weighs every element differently."""
    outputs = [output for output in outputs if output is not None]
    weights = [torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output) for output in outputs]
    loss = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=True))
    wanted = [each for each in (inputs, *parameters) if each.requires_grad]
    return [*outputs, *torch.autograd.grad(loss, wanted)]


def assert_same(found, expected, tolerance=1e-12):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def maps(*widths, bias=False, dtype=torch.float64):
    torch.manual_seed(1)
    return [nn.Linear(WIDTH, width, bias=bias, dtype=dtype) for width in widths]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [(7,), (48, 16, 33)])
def test_linear_maps(bias, widths):
    inputs, linears = random_inputs(), maps(*widths, bias=bias)
    assert training_kernels(inputs, linears[0].weight) is not None
    parameters = [parameter for linear in linears for parameter in linear.parameters()]
    expected = results([linear(inputs) for linear in linears], inputs, parameters)
    assert_same(results(linear_maps(inputs, *linears), inputs, parameters), expected)


def test_linear_maps_of_which_one_is_frozen_and_one_unused():
    inputs, linears = random_inputs(), maps(8, 9, 10)
    linears[0].requires_grad_(False)
    parameters = [linears[0].weight, linears[2].weight]
    expected = results([linears[0](inputs), None, linears[2](inputs)], inputs, parameters)
    found = linear_maps(inputs, *linears)
    assert_same(results([found[0], None, found[2]], inputs, parameters), expected)


def test_linear_maps_of_an_input_without_gradient_and_of_a_slice():
    wide, linears = random_inputs().detach(), maps(8, 9)
    inputs = torch.cat([wide, wide], -1)[..., 5 : 5 + WIDTH]
    parameters = [linear.weight for linear in linears]
    expected = results([linear(inputs) for linear in linears], inputs, parameters)
    assert_same(results(linear_maps(inputs, *linears), inputs, parameters), expected)


def test_rounded_products(monkeypatch):
    """Forward and backward products of rounded numbers; float64 and what is outside of the block stay as they are."""
    if not training_module().has_bf16_products():
        pytest.skip("this machine does not multiply bfloat16 numbers")
    monkeypatch.setattr(training_module(), "has_fast_bf16_products", lambda: True)
    inputs, (linear,) = random_inputs(torch.float32), maps(24, dtype=torch.float32)
    exact, weight = results([linear(inputs)], inputs, [linear.weight]), linear.weight.detach()
    with rounded_products():
        outputs = linear_maps(inputs, linear)
    found = results(outputs, inputs, [linear.weight])
    grad = torch.linspace(-1, 1, outputs[0].numel()).view(-1, 24).bfloat16().double()
    rows, rounded = inputs.detach().flatten(0, 1).bfloat16().double(), weight.bfloat16().double()
    expected = [rows @ rounded.T, grad @ rounded, grad.T @ rows]
    assert_same([x.double().flatten() for x in found], [x.flatten() for x in expected], 1e-4)
    assert not torch.allclose(found[0], exact[0], rtol=1e-5)
    assert_same(results(linear_maps(inputs, linear), inputs, [linear.weight]), exact, 1e-5)
    inputs, (linear,) = random_inputs(), maps(24)
    with rounded_products():
        assert_same(linear_maps(inputs, linear), [linear(inputs)])


def test_products_are_not_rounded_where_that_is_slower(monkeypatch):
    """As on Intel's processors, whose bfloat16 products take twice as long."""
    monkeypatch.setattr(training_module(), "has_fast_bf16_products", lambda: False)
    inputs, (linear,) = random_inputs(torch.float32), maps(24, dtype=torch.float32)
    exact = linear_maps(inputs, linear)[0]
    with rounded_products():
        assert torch.equal(linear_maps(inputs, linear)[0], exact)


def test_hooks_adapters_and_autocast_are_not_skipped():
    inputs, (linear,) = random_inputs(torch.float32), maps(8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_maps(inputs, linear)[0].dtype == torch.bfloat16
    inputs, (linear,) = random_inputs(), maps(8)
    seen = []
    for double in (
        lambda linear, given, output: seen.append(given) or 2 * output,
        lambda *_, **kwargs: seen.append(0),
    ):
        handle = linear.register_forward_hook(double, with_kwargs=bool(seen))
        (hooked,) = linear_maps(inputs, linear)
        expected = linear(inputs)
        handle.remove()
        assert_same([hooked], [expected])
    assert len(seen) == 4 and all(given[0] is inputs for given in seen[:2])

    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    adapter = Adapter(WIDTH, 8, dtype=torch.float64)
    assert torch.equal(linear_maps(inputs, adapter)[0], adapter(inputs))


def test_small_inputs_have_second_derivatives():
    inputs, (linear,) = random_inputs()[:1, :2].detach().requires_grad_(), maps(8)
    norm = nn.RMSNorm(8, eps=1e-6, dtype=torch.float64)

    def function(x):
        (first,) = linear_maps(x, linear)
        return gated_gelu(first, rms_norm(norm, first))

    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm(has_weight):
    norm = nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=has_weight, dtype=torch.float64)
    if has_weight:
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    inputs = random_inputs()
    parameters = list(norm.parameters())
    assert_same(results([rms_norm(norm, inputs)], inputs, parameters), results([norm(inputs)], inputs, parameters))


def test_gated_gelu():
    gate, value = random_inputs(), random_inputs(seed=1)
    expected = results([nn.functional.gelu(gate) * value], gate, [value])
    assert_same(results([gated_gelu(gate, value)], gate, [value]), expected)
