"""Operations of torch, recorded and run by the kernel, against torch in float64."""

import math

import pytest
import torch
from torch.nn import functional

step_cpu = pytest.importorskip("hf_recurrent.kernels.step_cpu")

from hf_recurrent.kernels.step_graph import UnsupportedOp  # noqa: E402 (after the check for the kernel)
from hf_recurrent.kernels.step_trace import StepTrace  # noqa: E402

STREAMS = 3


@torch.no_grad()
def run(function, *inputs, dtype=torch.float32):
    """The results (B, …) of a function of tensors (B, …) in the kernel, and in float64."""
    inputs = [tensor.to(dtype) for tensor in inputs]
    one = {f"x{number}": tensor[:1].clone() for number, tensor in enumerate(inputs)}
    trace = StepTrace(dtype, one)
    with trace:
        output = function(*one.values())
    program = step_cpu.StepProgram(trace.graph, {"output": trace.value(output)}, trace.guards)
    found = program.run({f"x{number}": tensor for number, tensor in enumerate(inputs)}, STREAMS)["output"]
    expected = torch.cat([function(*(t[row : row + 1].double() for t in inputs)) for row in range(STREAMS)])
    return found.view(expected.shape), expected


def spread(low, high, width=1003):
    """(B, width), an odd width: the last lanes are not full."""
    return torch.linspace(low, high, STREAMS * width, dtype=torch.float64).view(width, STREAMS).t().contiguous()


POSITIVE = torch.cat([spread(1e-30, 3), spread(1e-3, 1e6), torch.full((STREAMS, 1), 1e-42)], 1)
ALL = torch.cat([spread(-30, 30), spread(-1e-3, 1e-3), spread(-1.5, 1.5)], 1)
FUNCTIONS = {
    "exp": (torch.exp, torch.cat([spread(-86, 88.7), spread(-1e-3, 1e-3)], 1)),
    "expm1": (torch.expm1, torch.cat([spread(-90, 87), spread(-1e-3, 1e-3)], 1)),
    "log": (torch.log, POSITIVE),
    "log near 1": (torch.log, 1 + spread(-0.3, 0.3)),
    "log1p": (torch.log1p, torch.cat([spread(-0.99, 5), spread(-1e-4, 1e-4), spread(5, 1e8)], 1)),
    "sigmoid": (torch.sigmoid, ALL),
    "tanh": (torch.tanh, ALL),
    "softplus": (functional.softplus, ALL),
    "silu": (functional.silu, ALL),
    "gelu": (functional.gelu, spread(-5, 14)),
    "gelu tanh": (lambda x: functional.gelu(x, approximate="tanh"), spread(-2, 8)),
    "erf": (torch.erf, ALL),
    "sin": (torch.sin, spread(-10, 10)),
    "cos": (torch.cos, spread(-10, 10)),
    "sqrt": (torch.sqrt, POSITIVE),
    "rsqrt": (torch.rsqrt, spread(1e-3, 50)),
    "reciprocal": (torch.reciprocal, spread(1e-3, 50)),
    "pow": (lambda x: x**1.7, spread(1e-3, 50)),
    "elu": (functional.elu, ALL),
    "leaky_relu": (functional.leaky_relu, ALL),
    "hardtanh": (functional.hardtanh, ALL),
    "logsigmoid": (functional.logsigmoid, ALL),
    "abs": (torch.abs, ALL),
    "comparisons": (lambda x: torch.where((x > 0.5) & (x <= 2) if False else x > 0.5, x, -x), ALL),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_accurate_to_a_few_units_in_the_last_place(name):
    function, inputs = FUNCTIONS[name]
    inputs = inputs.float().double()
    found, expected = run(function, inputs)
    unit = expected.abs().clamp_min(1e-37) * 2**-23
    # Near a zero of sin and cos, and at GeLU's cancellation, the error is the argument's.
    slack = 2**-23 if name in ("sin", "cos", "gelu tanh") else 0
    assert ((found - expected).abs() <= 8 * unit + 4 * slack).all()
    found, expected = run(function, inputs, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("function", [torch.exp, torch.expm1, torch.log, torch.log1p, torch.sigmoid, torch.tanh])
def test_values_that_are_not_finite(function):
    inputs = torch.tensor([[math.nan, math.inf, -math.inf, 0.0, 100.0, -150.0, -1.0]] * STREAMS)
    found, expected = run(function, inputs.double())
    torch.testing.assert_close(found.double(), expected.float().double(), equal_nan=True, rtol=1e-5, atol=1e-37)


WEIGHT = torch.linspace(-1, 1, 12 * 20).view(12, 20).sin()
MAPS = {
    "linear": lambda x: functional.linear(x, WEIGHT.to(x)),
    "a product with a weight that is not transposed": lambda x: x @ WEIGHT.to(x).t().contiguous(),
    "several rows": lambda x: functional.linear(x.view(-1, 4, 5), WEIGHT.to(x)[:7, :5], WEIGHT.to(x)[0, :7]),
    "layer norm": lambda x: functional.layer_norm(x, (20,), WEIGHT.to(x)[0], WEIGHT.to(x)[1]),
    "rms norm": lambda x: functional.rms_norm(x.view(-1, 4, 5), (5,), WEIGHT.to(x)[0, :5], eps=1e-5),
    "softmax": lambda x: x.view(-1, 4, 5).softmax(-1),
    "sums": lambda x: torch.cat([x.view(-1, 4, 5).sum(1), x.view(-1, 4, 5).mean(2), x.amax(1, keepdim=True)], 1),
    "product": lambda x: torch.bmm(x.view(-1, 4, 5), x.view(-1, 5, 4)),
    "moves": lambda x: torch.stack([x.roll(3, 1), x.flip(1)], 1).transpose(1, 2).reshape(-1, 40)[:, 3:31:2] * 2,
    "moves of runs": lambda x: x.view(-1, 2, 5, 2).transpose(1, 2).reshape(-1, 20) * 2,
    "moves of runs of several": lambda x: torch.stack([x.view(-1, 10, 2), x.view(-1, 10, 2) + 1], 2).flatten(1) * 2,
    "padding": lambda x: functional.pad(x.view(-1, 4, 5), (1, 2)).flatten(1) + 1,
    "broadcast": lambda x: (x.view(-1, 4, 5) * x[:, :5].unsqueeze(1) + x[:, 4:8].unsqueeze(2)).flatten(1),
    "scalar of a stream": lambda x: x * x.sum(1, keepdim=True) / x[:, 3:4],
    "gather": lambda x: x.gather(1, torch.tensor([[3, 3, 0, 19]]).expand(len(x), -1)),
    "masks": lambda x: x.masked_fill(torch.arange(20) % 3 == 0, -7.0) + torch.where(x > 0, x, 0.1 * x),
    "in place": lambda x: x.clone().mul_(2).add_(1).clamp_(max=1.5),
    "many temporaries": lambda x: sum((x * n).sin() * (x + n) for n in range(30)),
    "a constant output": lambda x: torch.cat([x, x.new_ones(len(x), 3)], 1),
    "an input as output": lambda x: x[:, 2:9],
    "complex": lambda x: torch.view_as_real(
        torch.complex(x, x + 1) * torch.complex(x * 2, x) + 1j * torch.complex(x, x)
    ).flatten(1),
}


@pytest.mark.parametrize("name", MAPS)
def test_operations(name):
    torch.manual_seed(0)
    found, expected = run(MAPS[name], torch.randn(STREAMS, 20, dtype=torch.float64) + 0.3, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": "numbers"}, {"attn_mask": "bool"}])
def test_attention(options):
    torch.manual_seed(0)
    masks = {"numbers": torch.randn(3, 3), "bool": torch.ones(3, 3, dtype=torch.bool).tril()}

    def attend(x):
        query, key, value = x.view(-1, 3, 3, 2, 4).permute(2, 0, 3, 1, 4)
        given = dict(options)
        if "attn_mask" in given:
            mask = masks[given["attn_mask"]]
            given["attn_mask"] = mask if mask.dtype == torch.bool else mask.to(x)
        return functional.scaled_dot_product_attention(query, key, value, **given).transpose(1, 2).flatten(1)

    found, expected = run(attend, torch.randn(STREAMS, 72, dtype=torch.float64), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def overwritten(x):
    view = x[:, :5]
    x.mul_(2)
    return view + 1


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.sort(1).values, "aten.sort"),
        (lambda x: x.half() + 1, "torch.float16"),
        (lambda x: functional.dropout(x, 0.5), "aten."),
        (overwritten, "changed in place"),
        (lambda x: torch.zeros(1, 40).index_put_((torch.tensor([0]),), x.repeat(1, 2)), "aten.index_put_"),
        (lambda x: x.gather(1, x.argsort(1)), "aten."),
    ],
)
def test_operations_without_a_form_are_named(function, name):
    with pytest.raises(UnsupportedOp, match=name):
        run(function, torch.randn(STREAMS, 20))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_reach_every_output_of_int8_weights(number):
    """Wherever they stand in the input, also before larger numbers in the same vector."""
    weight = torch.randn(5, 43, generator=torch.Generator().manual_seed(0))
    one = torch.ones(1, 43)
    trace = StepTrace(torch.float32, {"x": one})
    with trace:
        output = functional.linear(one, weight)
    program = step_cpu.StepProgram(trace.graph, {"output": trace.value(output)}, trace.guards, "int8")
    for place in range(43):
        x = torch.linspace(1, 2, 43)[None].repeat(STREAMS, 1)
        x[:, place] = number
        assert not program.run({"x": x}, STREAMS)["output"].isfinite().any(), place
