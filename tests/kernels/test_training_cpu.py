"""The compiled parts of a training step against plain torch, in float64 and float32, at every instruction set."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_recurrent.modeling.block import recurrent_blocks

training_cpu = pytest.importorskip("hf_recurrent.kernels.training_cpu", reason="the kernel was not built")

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
TYPES = list(TOLERANCE)
SHAPES = [(1, 1), (3, 5), (7, 33), (130, 96), (2, 70, 192)]


@pytest.fixture(params=[0, 1, 2], ids=["level0", "level1", "level2"], autouse=True)
def level(request):
    best = training_cpu.instruction_level()
    if training_cpu.instruction_level(request.param) != request.param:
        pytest.skip("this machine has no such instructions")
    yield
    training_cpu.instruction_level(best)


def numbers(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_near(found, expected, dtype, factor=1):
    expected = expected.detach()
    scale = max(1.0, float(expected.abs().max()))
    assert float((found.double() - expected.double()).abs().max()) <= TOLERANCE[dtype] * factor * scale


# ---- Matrix products ----


def product_cases(rows, depth, width, dtype):
    """The three products of a linear map: its output, the gradients of its input and of its weight."""
    x, weight, grad = numbers(rows, depth, dtype=dtype), numbers(width, depth, dtype=dtype, seed=1), None
    grad = numbers(rows, width, dtype=dtype, seed=2)
    return {"output": (x, weight.T), "input": (grad, weight), "weight": (grad.T, x)}


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 80), depth=st.integers(1, 70), width=st.integers(1, 80))
def test_products_of_any_size(dtype, rows, depth, width):
    for a, b in product_cases(rows, depth, width, dtype).values():
        to = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=dtype)
        training_cpu.multiply([(a, b, to, False)])
        assert_near(to, a.double() @ b.double(), dtype, 4)


def needs_bf16():
    if not training_cpu.has_bf16_products():
        pytest.skip("this machine does not multiply bfloat16 numbers, or not at this level")


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 80), depth=st.integers(1, 70), width=st.integers(1, 80))
def test_rounded_products_of_any_size(rows, depth, width):
    needs_bf16()
    for a, b in product_cases(rows, depth, width, torch.float32).values():
        to = torch.full((a.shape[0], b.shape[1]), float("nan"))
        training_cpu.multiply([(a, b, to, False)], rounded=True)
        assert_near(to, a.bfloat16().double() @ b.bfloat16().double(), torch.float32, 4)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_rounded_products_keep_numbers_that_are_not_finite(number):
    needs_bf16()
    a, b, to = numbers(3, 40, dtype=torch.float32), numbers(40, 5, dtype=torch.float32), torch.empty(3, 5)
    a[1, 7] = number
    training_cpu.multiply([(a, b, to, False)], rounded=True)
    assert to.isfinite().all(-1).tolist() == [True, False, True]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "rounded"), [(torch.float32, False), (torch.float64, False), (torch.float32, True)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_products_do_not_depend_on_threads(dtype, rounded, threads):
    """Sizes beyond a block of the depth and of panels, in one call with a shared and an added product."""
    if rounded:
        needs_bf16()
    rows, depth, width = 300, 601, 500
    cases = product_cases(rows, depth, width, dtype)
    before = torch.get_num_threads()
    results = []
    for number in (1, threads):
        torch.set_num_threads(number)
        outputs = [torch.empty(a.shape[0], b.shape[1], dtype=dtype) for a, b in cases.values()]
        twice = torch.empty(rows, width, dtype=dtype)
        products = [(a, b, to, False) for (a, b), to in zip(cases.values(), outputs, strict=True)]
        a, b = cases["output"]
        training_cpu.multiply([*products, (a, b, twice, False), (a, b, twice, True)], rounded=rounded)
        results.append([*outputs, twice])
    torch.set_num_threads(before)
    for one, other, (a, b) in zip(
        *results, [*cases.values(), (2 * cases["output"][0], cases["output"][1])], strict=True
    ):
        assert torch.equal(one, other)
        a, b = (x.bfloat16() if rounded else x for x in (a, b))
        assert_near(one, a.double() @ b.double(), dtype, 20)


@pytest.mark.parametrize("rounded", [False, True])
def test_products_that_share_a_matrix(rounded):
    """Gradients of weights of one input, of which the last one is added up of two."""
    if rounded:
        needs_bf16()
    dtype, before, found = torch.float32 if rounded else torch.float64, torch.get_num_threads(), []
    x, grads = numbers(300, 40, dtype=dtype), [numbers(300, width, dtype=dtype, seed=width) for width in (70, 5, 33)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs = [torch.empty(grad.shape[1], 40, dtype=dtype) for grad in grads]
        products = [(grad.T, x, to, False) for grad, to in zip(grads, outputs, strict=True)]
        training_cpu.multiply([*products, (grads[2].T, x, outputs[2], True)], rounded=rounded)
        found.append(outputs)
    torch.set_num_threads(before)
    for number, (grad, *results) in enumerate(zip(grads, *found, strict=True)):
        grad, inputs = (each.bfloat16() if rounded else each for each in (grad, x))
        assert_near(results[0], (1 + (number == 2)) * (grad.T.double() @ inputs.double()), dtype, 20)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 13, 14, 33, 64]),
    depth=st.sampled_from([1, 17, 256, 300, 513]),
    width=st.sampled_from([1, 31, 32, 130, 600]),
    threads=st.sampled_from([1, 2, 3]),
)
def test_products_with_few_rows_have_the_bits_of_others(dtype, rows, depth, width, threads):
    """Outputs of two maps, gradients of their input added up, and results that are added to."""
    x, weights = numbers(rows, depth, dtype=dtype), [numbers(width, depth, dtype=dtype, seed=seed) for seed in (1, 2)]
    grads = [numbers(rows, width, dtype=dtype, seed=seed) for seed in (3, 4)]
    before, found = torch.get_num_threads(), []
    with pytest.MonkeyPatch.context() as patch:
        for few, number in ((0, 1), (64, threads)):
            patch.setattr(training_cpu, "_FEW_ROWS", few)
            patch.setattr(training_cpu, "_SERIAL_PRODUCTS", 0)
            torch.set_num_threads(number)
            outputs = [numbers(rows, width, dtype=dtype, seed=5) for _ in range(3)]
            of_x, of_weight = torch.full_like(x, float("nan")), torch.empty(width, depth, dtype=dtype)
            adds = (False, False, True)
            training_cpu.multiply(
                [(x, w.T, to, add) for w, to, add in zip((*weights, weights[0]), outputs, adds, strict=True)]
            )
            sums = [(grad, weight, of_x, i > 0) for i, (grad, weight) in enumerate(zip(grads, weights, strict=True))]
            training_cpu.multiply([*sums, (grads[0].T, x, of_weight, False)])
            found.append([*outputs, of_x, of_weight])
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))
    assert_near(found[1][0], x.double() @ weights[0].double().T, dtype, 20)
    of_x = sum(grad.double() @ weight.double() for grad, weight in zip(grads, weights, strict=True))
    assert_near(found[1][3], of_x, dtype, 20)


def test_products_of_slices():
    """Rows with gaps, as parts of wider tensors have, and results next to other numbers."""
    wide = numbers(40, 90, dtype=torch.float32)
    a, b, to = (
        wide[:, 3:53],
        wide[:50, 20:83] if wide.shape[0] >= 50 else numbers(50, 90, dtype=torch.float32)[:, 20:83],
        torch.zeros(40, 100),
    )
    training_cpu.multiply([(a, b, to[:, 10:73], False)])
    assert_near(to[:, 10:73], a.double() @ b.double(), torch.float32, 4)
    assert not to[:, :10].any() and not to[:, 73:].any()
    gaps = [numbers(40, 180, dtype=torch.float32, seed=seed)[::2, ::2] for seed in range(4)]  # copied until the call
    found = [torch.empty(20, 20) for _ in gaps]
    training_cpu.multiply([(x, x.T, one, False) for x, one in zip(gaps, found, strict=True)])
    for x, one in zip(gaps, found, strict=True):
        assert_near(one, x.double() @ x.T.double(), torch.float32, 4)


def test_products_refuse_other_types():
    x = numbers(4, 4, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"`b` has type torch\.float64"):
        training_cpu.multiply([(x, x.double(), x, False)])


# ---- Element-wise passes ----


def gradients(function, inputs, grad):
    """Outputs and gradients of plain torch in float64."""
    inputs = [x.double().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs, torch.autograd.grad(outputs, inputs, [g.double() for g in grad])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_norm(dtype, shape):
    gate, value, grad = (numbers(*shape, dtype=dtype, seed=seed) for seed in range(3))
    norm = lambda x: nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)  # noqa: E731
    outputs, grads = gradients(lambda g, v: norm(nn.functional.gelu(norm(g)) * norm(v)), (gate, value), (grad,))
    found, moments = training_cpu.gated_norm(gate, value, 1e-6)
    factor = 1 if shape[-1] > 5 else 1e6  # norms of few numbers divide by almost nothing
    assert_near(found, outputs[0], dtype, factor)
    for one, expected in zip(training_cpu.gated_norm_backward(gate, value, moments, grad, 1e-6), grads, strict=True):
        assert_near(one, expected, dtype, 4 * factor)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_gelu(dtype, shape):
    gate, value, grad = (numbers(*shape, dtype=dtype, seed=seed) for seed in range(3))
    gate = gate * 4
    outputs, grads = gradients(lambda g, v: nn.functional.gelu(g) * v, (gate, value), (grad,))
    assert_near(training_cpu.gated_gelu(gate, value), outputs[0], dtype)
    for one, expected in zip(training_cpu.gated_gelu_backward(gate, value, grad), grads, strict=True):
        assert_near(one, expected, dtype)


def test_gelu_and_its_slope_are_accurate_everywhere():
    """Also at the ends of the segments on which AVX-512 has polynomials, and beyond the last one."""
    segments = torch.arange(-20, 20, 6 / 16)
    x = torch.cat([torch.linspace(-20, 20, 100_001), segments, segments + 1e-6, torch.tensor([-0.0, -1e30, 1e30])])[
        None
    ]
    ones = torch.ones_like(x)
    (expected,), (of_x,) = gradients(nn.functional.gelu, (x,), (ones,))
    found, (slope, _) = training_cpu.gated_gelu(x, ones), training_cpu.gated_gelu_backward(x, ones, ones)
    assert ((found - expected).abs() <= 1e-7 * expected.abs().clamp_min(1)).all()
    assert ((slope - of_x).abs() <= 2.5e-7).all()


def coefficients(recurrence_gate, rate, input_gate, inputs, sigmoid_gate=False):
    input_gate = torch.sigmoid(input_gate) if sigmoid_gate else input_gate
    log_decay = -rate * torch.sigmoid(recurrence_gate)
    return torch.exp(log_decay), torch.sqrt((-torch.expm1(2 * log_decay)).clamp(min=1e-12)) * input_gate * inputs


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sigmoid_gate", [False, True])
def test_gate_coefficients(dtype, shape, sigmoid_gate):
    gate, input_gate, inputs, *grads = (numbers(*shape, dtype=dtype, seed=seed) for seed in range(5))
    rate = numbers(shape[-1], dtype=dtype, seed=9).abs() / 10 + 1e-3
    arguments, how = (gate * 3, rate, input_gate, inputs), {"sigmoid_gate": sigmoid_gate}
    outputs, expected = gradients(partial(coefficients, **how), arguments, grads)
    for one, other in zip(training_cpu.gate_coefficients(*arguments, **how), outputs, strict=True):
        assert_near(one, other, dtype)
    found = training_cpu.gate_coefficients_backward(*arguments, *grads, **how)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, dtype, 8)


def test_gate_coefficients_where_nothing_decays():
    """r = 1 to the last bit: γ is at its smallest, and no gradient goes through it."""
    gate = torch.full((2, 3), -200.0)
    ones = torch.ones(2, 3)
    decay, scaled = training_cpu.gate_coefficients(gate, ones[0], ones, ones)
    assert torch.equal(decay, ones) and torch.allclose(scaled, torch.full((2, 3), 1e-6))
    found = training_cpu.gate_coefficients_backward(gate, ones[0], ones, ones, ones, ones)
    assert all(torch.isfinite(grad).all() for grad in found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm(dtype, shape, has_weight):
    x, grad, weight = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1), None
    if has_weight:
        weight = numbers(shape[-1], dtype=dtype, seed=2)
    norm = lambda *given: nn.functional.rms_norm(given[0], x.shape[-1:], *given[1:], eps=1e-6)  # noqa: E731
    outputs, grads = gradients(norm, (x, weight) if has_weight else (x,), (grad,))
    found, scales = training_cpu.rms_norm(x, weight, 1e-6)
    factor = 1e4 if shape[-1] < 5 else 4
    assert_near(found, outputs[0], dtype, factor)
    for one, expected in zip(training_cpu.rms_norm_backward(x, weight, scales, grad, 1e-6), grads, strict=False):
        assert_near(one, expected, dtype, factor)


# ---- Tables ----


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("outputs", "size"), [(1, 90), (63, 90), (64, 90), (65, 90), (400, 90), (400, 5_000)])
def test_tables(dtype, outputs, size):
    """Sums of rows, their gradients as torch's sparse ones, and a step of row-wise Adagrad in its definition."""
    generator = torch.Generator().manual_seed(outputs)
    table, grad = numbers(size, 37, dtype=dtype), numbers(outputs, 37, dtype=dtype, seed=1)
    lookups = torch.randint(0, size, (outputs, 5), generator=generator) // torch.randint(
        1, 9, (outputs, 1), generator=generator
    )
    assert_near(training_cpu.table_sum(table, lookups), table.double()[lookups].sum(1), dtype)
    expected = torch.zeros(size, 37, dtype=torch.float64)
    expected.index_add_(0, lookups.flatten(), grad.double().repeat_interleave(5, 0))
    rows, values = training_cpu.table_gradient(table, lookups, grad)
    assert torch.equal(rows, lookups.unique())
    assert_near(values, expected[rows], dtype, 8)
    parts = [training_cpu.table_gradient(table, lookups[i::3], grad[i::3]) for i in range(3)]
    dense = [torch.zeros(size, 37, dtype=dtype).index_copy_(0, *part) for part in parts]
    added_rows, added_values = training_cpu.add_rows(parts)
    assert torch.equal(added_rows, rows) and torch.equal(added_values, sum(dense)[rows])
    sums, before = numbers(size, dtype=dtype, seed=2).abs(), table.clone()
    new = sums.double()[rows] + values.double().square().mean(1)
    after = before.double()
    after[rows] -= values.double() * (0.1 / (new.sqrt() + 1e-10))[:, None]
    training_cpu.table_adagrad(table, sums, rows, values, 0.1, 1e-10)
    assert_near(sums[rows], new, dtype, 4)
    assert_near(table, after, dtype, 4)


def test_rows_with_large_numbers():
    """Each of the passes of the sort; no table has as many rows, so that only the order is looked at."""
    numbers_of_rows = torch.tensor([[2**40, 7, 2**22, 2**40], [2**11, 0, 7, 2**33 + 1]])
    ordered, order, ranks, count = training_cpu.table_order(numbers_of_rows.flatten())
    expected = numbers_of_rows.flatten().sort(stable=True)
    assert torch.equal(ordered, expected.values) and torch.equal(order, expected.indices)
    assert ranks.tolist() == [0, 1, 1, 2, 3, 4, 5, 5] and count == 6


def test_no_rows_of_a_table():
    table = numbers(3, 8, dtype=torch.float32)
    rows, values = training_cpu.table_gradient(table, torch.zeros(0, 5, dtype=torch.long), torch.zeros(0, 8))
    assert rows.shape == (0,) and values.shape == (0, 8)
    assert training_cpu.table_sum(table, torch.zeros(0, 5, dtype=torch.long)).shape == (0, 8)


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_outside_a_table(row):
    table = numbers(3, 8, dtype=torch.float32)
    with pytest.raises(IndexError, match="the table has 3 rows"):
        training_cpu.table_sum(table, torch.tensor([[0, row]]))


@pytest.mark.parametrize("threads", [2, 3])
def test_passes_do_not_depend_on_threads(threads):
    """Sums over rows are added up in one order."""
    gate, input_gate, inputs, *grads = (numbers(700, 96, dtype=torch.float32, seed=seed) for seed in range(5))
    rate, before, results = gate[0].abs(), torch.get_num_threads(), []
    for number in (1, threads):
        torch.set_num_threads(number)
        to, moments = training_cpu.gated_norm(gate, inputs, 1e-6)
        found = training_cpu.gate_coefficients_backward(gate, rate, input_gate, inputs, *grads)
        results.append([to, *training_cpu.gated_norm_backward(gate, inputs, moments, grads[0], 1e-6), *found])
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_visible(number):
    """A NaN or infinite number in a row makes a result of this row NaN or infinite, and of no other row."""
    gate = numbers(4, 40, dtype=torch.float32)
    gate[1, 3] = number
    for result in (
        training_cpu.gated_norm(gate, gate.clone(), 1e-6)[0],
        training_cpu.gated_gelu(gate, torch.ones_like(gate)),
        training_cpu.rms_norm(gate, None, 1e-6)[0],
    ):
        rows = torch.isfinite(result).all(-1)
        assert rows[[0, 2, 3]].all() and not rows[1]


# ---- Temporal convolution ----


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("streams, steps, width, lags", [(1, 1, 8, 5), (3, 7, 5, 4), (2, 64, 33, 4), (5, 130, 48, 2)])
def test_temporal_convolution(streams, steps, width, lags, dtype, resets, monkeypatch):
    inputs, grad = (numbers(streams, steps, width, dtype=dtype, seed=seed) for seed in range(2))
    taps, weight = numbers(streams, lags - 1, width, dtype=dtype), numbers(lags, width, dtype=dtype)
    mask = numbers(streams, steps) > 0.5 if resets else None
    found = training_cpu.temporal_convolution(inputs, taps, weight, mask)
    grads = training_cpu.temporal_convolution_backward(inputs, taps, weight, mask, grad)
    monkeypatch.setattr(recurrent_blocks, "layer_kernels", lambda *_: None)
    plain = lambda *tensors: recurrent_blocks.temporal_convolution(*tensors, mask)[0]  # noqa: E731
    (output,), expected = gradients(plain, (inputs, taps, weight), (grad,))
    assert_near(found, output, dtype)
    for one, other in zip(grads, expected, strict=True):
        assert_near(one, other, dtype, 4)


def test_convolution_of_a_model_is_the_kernel():
    """In training and without gradients, from some size on."""
    convolution = recurrent_blocks.TemporalConvolution(64, 4)
    nn.init.normal_(convolution.weight)
    inputs, taps = numbers(2, 128, 64, dtype=torch.float32), numbers(2, 3, 64, dtype=torch.float32)
    output, _ = convolution(inputs, taps)
    assert type(output.grad_fn).__name__ == "_FusedConvolutionBackward"
    assert torch.equal(output, training_cpu.temporal_convolution(inputs, taps, convolution.weight, None))


# ---- Cross-entropy ----


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 5), (7, 33), (130, 256)])
def test_cross_entropy(dtype, rows, width):
    logits, grad = 5 * numbers(rows, width, dtype=dtype), numbers(rows, dtype=dtype, seed=1)
    targets = torch.arange(rows) * 7 % width
    targets[rows // 2] = -100
    loss = lambda x: nn.functional.cross_entropy(x, targets, reduction="none")  # noqa: E731
    (nats,), (expected,) = gradients(loss, (logits,), (grad,))
    found, kept = training_cpu.cross_entropy(logits, targets, -100)
    assert_near(found, nats, dtype)
    assert_near(training_cpu.cross_entropy_backward(logits, targets, kept, grad), expected, dtype)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_cross_entropy_of_logits_that_are_not_finite(number):
    logits, targets = numbers(4, 40, dtype=torch.float32), torch.tensor([0, 1, 2, 3])
    logits[1, 7] = number
    found, _ = training_cpu.cross_entropy(logits, targets, -100)
    expected = nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_cross_entropy_refuses_targets_outside_of_the_columns():
    logits = numbers(2, 4, dtype=torch.float32)
    for targets in ([0, 4], [-1, 3]):
        with pytest.raises(IndexError, match="4 columns"):
            training_cpu.cross_entropy(logits, torch.tensor(targets), -100)
