"""The linear recurrence: every backend against a sequential loop in float64, and everything autograd promises."""

import importlib
import itertools
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from hf_recurrent.modeling.scan import linear_scan as linear_scan_module
from hf_recurrent.modeling.scan.linear_scan import available_backends, linear_scan, linear_scan_reference

# Narrow types: outputs and gradients are rounded once from float32 (half a unit in the last place), and da is built
# from the rounded h, which adds as much again; four units cover both. float32: errors of a decaying sum stay at a few
# units whatever T. float64: the order of the additions is all that differs.
TOLERANCE = {
    torch.bfloat16: 4 * 2**-8,
    torch.float16: 4 * 2**-11,
    torch.float32: 2e-6,
    torch.float64: 1e-13,
    torch.complex64: 4e-6,
    torch.complex128: 2e-13,
}
# T = 1, B = 1, S = 1, primes, blocks with a remainder, wide rows, narrow and long.
SHAPES = [(1, 1, 1), (3, 1, 5), (1, 7, 1), (2, 33, 3), (1, 1013, 5), (3, 257, 129), (1, 2048, 1), (2, 40, 2500)]
RESETS = ("none", "random", "all", "first")


def make_inputs(shape, dtype=torch.float32, resets="none", seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch, steps, width = shape
    wide = torch.complex128 if dtype.is_complex else torch.float64
    draw = lambda *size: torch.randn(*size, dtype=wide, generator=generator)  # noqa: E731
    a = torch.rand(shape, dtype=torch.float64, generator=generator).sqrt()
    if dtype.is_complex:
        a = torch.polar(a, draw(*shape).real)
    state_dtype = torch.promote_types(dtype, torch.float32)
    mask = torch.rand(batch, steps, generator=generator) < 0.1
    if resets == "first":
        mask = torch.zeros_like(mask)
        mask[:, 0] = True
    elif resets == "all":
        mask = torch.ones_like(mask)
    return (
        a.to(dtype),
        draw(*shape).to(dtype),
        draw(batch, width).to(state_dtype),
        None if resets == "none" else mask,
        draw(*shape).to(dtype),
        draw(batch, width).to(state_dtype),
    )


def run(function, a, b, state, mask, grad_h, grad_final, **options):
    """h, final state and the gradients of a, b and the initial state."""
    leaves = [x.detach().clone().requires_grad_() for x in (a, b, state)]
    outputs = function(*leaves, mask, **options)
    return *(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, (grad_h, grad_final))


def expected(inputs):
    """The reference on the same numbers in double precision."""
    wide = torch.complex128 if inputs[0].is_complex() else torch.float64
    return run(linear_scan_reference, *(x if x is None or x.dtype == torch.bool else x.to(wide) for x in inputs))


def assert_close(actual, wanted, tolerance):
    for name, x, y in zip(("h", "final", "grad a", "grad b", "grad state"), actual, wanted, strict=True):
        error = (x.to(y.dtype) - y).abs().max() / y.abs().max().clamp(min=1)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("resets", RESETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_float64_loop(shape, resets, backend):
    inputs = make_inputs(shape, resets=resets)
    assert_close(run(linear_scan, *inputs, backend=backend), expected(inputs), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 300, 7), (3, 20, 2000)], ids=str)
def test_every_type(shape, dtype):
    inputs = make_inputs(shape, dtype, "random")
    h, final, *grads = outputs = run(linear_scan, *inputs)
    assert h.dtype == dtype and final.dtype == torch.promote_types(dtype, torch.float32)
    assert [g.dtype for g in grads] == [dtype, dtype, final.dtype]
    assert_close(outputs, expected(inputs), TOLERANCE[dtype])


def test_narrow_inputs_keep_a_float32_state():
    """With decay 1, adding 2**-9 to 1 in bfloat16 would never move it."""
    ones = torch.ones(1, 600, 2, dtype=torch.bfloat16)
    _, final = linear_scan(ones, ones * 2**-9, torch.ones(1, 2))
    assert torch.equal(final, torch.full((1, 2), 1 + 600 * 2**-9))


def test_mixed_types_promote_and_gradients_keep_their_leaf_type():
    a, b = torch.rand(2, 9, 3, requires_grad=True), torch.randn(2, 9, 3, dtype=torch.bfloat16, requires_grad=True)
    h, final = linear_scan(a, b)
    (h.sum() + final.sum()).backward()
    assert (h.dtype, a.grad.dtype, b.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    complex_decay = torch.rand(2, 9, 3, dtype=torch.complex64)
    assert linear_scan(complex_decay, torch.randn(2, 9, 3))[0].dtype == torch.complex64


@pytest.mark.parametrize("shape", [(2, 50, 6), (2, 5, 4096)], ids=str)
def test_any_strides(shape):
    a, b, state, mask, grad_h, grad_final = make_inputs(shape, resets="random")
    strided = (
        a.transpose(0, 2).contiguous().transpose(0, 2),
        b.repeat_interleave(2, dim=1)[:, ::2],
        state.t().contiguous().t(),
        mask.t().contiguous().t(),
        grad_h.transpose(1, 2).contiguous().transpose(1, 2),
        grad_final,
    )
    assert not any(x.is_contiguous() for x in strided[:5])
    plain = (a, b, state, mask, grad_h, grad_final)
    assert_close(run(linear_scan, *strided), expected(plain), TOLERANCE[torch.float32])
    shared_decay = a[:1, :1].expand(shape)
    wanted, _ = linear_scan_reference(shared_decay, b, state, mask)
    torch.testing.assert_close(linear_scan(shared_decay, b, state, mask)[0], wanted)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("width", [2, 5000])
@pytest.mark.parametrize("steps", [1, 3, 200])
def test_a_reset_forgets_infinities_and_nan(steps, width, backend):
    a, b, state, _, grad_h, grad_final = make_inputs((2, steps, width))
    mask = torch.zeros(2, steps, dtype=torch.bool)
    mask[0, 0] = mask[1, steps // 2] = True
    state[0, 0], state[0, 1] = float("nan"), float("inf")
    if steps > 2:
        b[1, steps // 2 - 1] = float("nan")
    h, final, grad_a, grad_b, grad_state = run(linear_scan, a, b, state, mask, grad_h, grad_final, backend=backend)
    assert h[0].isfinite().all() and h[1, steps // 2 :].isfinite().all() and final.isfinite().all()
    assert grad_b.isfinite().all() and grad_state.isfinite().all()
    assert (grad_a[mask] == 0).all() and (grad_state[0] == 0).all()


def test_an_overflowing_product_of_decays_keeps_exact_zeros():
    a, b = torch.full((1, 4096, 2), 1e10), torch.zeros(1, 4096, 2)
    h, final = linear_scan(a, b, backend="torch")
    assert (h == 0).all() and (final == 0).all()


def test_slow_decays_do_not_add_up_errors():
    """Decays within 1e-4 of 1 in plain torch, whose chunks multiply many of them."""
    inputs = make_inputs((1, 65_536, 16))
    inputs = (1 - 1e-4 * (1 - inputs[0]), *inputs[1:])
    wide = run(linear_scan, *(x if x is None else x.double() for x in inputs), backend="torch")
    assert_close(run(linear_scan, *inputs, backend="torch"), wide, 2e-6)


@pytest.mark.parametrize("width", [1, 3])
def test_long_sequences_lose_nothing(width):
    inputs = make_inputs((1, 65_536, width), resets="random")
    state64 = [x.double() for x in (inputs[0], inputs[1], inputs[2])]
    a, b = (x[0].numpy() for x in state64[:2])
    wanted, state = torch.empty(1, 65_536, width, dtype=torch.float64), state64[2][0].numpy()
    for t, reset in enumerate(inputs[3][0].tolist()):
        state = a[t] * (0 if reset else state) + b[t]
        wanted[0, t] = torch.from_numpy(state)
    h, final, grad_a, grad_b, grad_state = run(linear_scan, *inputs)
    assert (h - wanted).abs().max() / wanted.abs().max() <= 2e-6
    # The gradients in float64 from the same operator, which gradcheck below ties to finite differences.
    wide = run(linear_scan, *(x if x.dtype == torch.bool else x.double() for x in inputs))
    assert_close((h, final, grad_a, grad_b, grad_state), wide, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 7, 2), (1, 40, 1)], ids=str)
@pytest.mark.parametrize("resets", RESETS)
def test_gradients_against_finite_differences(shape, dtype, resets):
    a, b, state, mask, *_ = make_inputs(shape, dtype, resets)
    leaves = [x.requires_grad_() for x in (a, b, state)]
    assert torch.autograd.gradcheck(lambda *x: linear_scan(*x, mask), leaves)


def test_lazy_conjugation_and_negation_are_applied():
    a, b, state, mask, grad_h, grad_final = make_inputs((2, 40, 3), torch.complex128, "random")
    for use in (linear_scan, torch.compile(linear_scan, fullgraph=True, backend="aot_eager")):
        actual, wanted = (
            run(
                lambda *x, f=function: f(*(y.conj() for y in x[:3]), x[3]),
                a,
                b,
                state,
                mask,
                grad_h.conj(),
                grad_final.conj(),
            )
            for function in (use, linear_scan_reference)
        )
        assert_close(actual, wanted, TOLERANCE[torch.complex128])
    negative = a.conj().imag
    assert negative.is_neg()
    torch.testing.assert_close(linear_scan(negative, b.real), linear_scan_reference(negative, b.real))


def test_gradients_from_one_output_only():
    for use in (0, 1):
        results = []
        for function in (linear_scan, linear_scan_reference):
            leaves = [x.clone().requires_grad_() for x in make_inputs((2, 37, 3), torch.float64)[:3]]
            results.append(torch.autograd.grad(function(*leaves)[use].square().sum(), leaves))
        torch.testing.assert_close(*results)


def test_second_derivatives_are_refused_not_wrong():
    a, b, state, *_ = make_inputs((1, 3, 2), torch.float64)
    h, _ = linear_scan(a.requires_grad_(), b, state)
    (grad,) = torch.autograd.grad(h.square().sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@settings(max_examples=25, deadline=None)
@given(steps=st.integers(1, 200), cuts=st.sets(st.integers(1, 199), max_size=5), width=st.sampled_from([1, 3, 64]))
def test_any_cutting_into_blocks_gives_the_whole(steps, cuts, width):
    a, b, state, mask, *_ = make_inputs((2, steps, width), torch.float64, "random", seed=steps)
    whole = [x.clone().requires_grad_() for x in (a, b, state)]
    h, final = linear_scan(*whole, mask)
    grads = torch.autograd.grad(h.square().sum() + final.sum(), whole)
    pieces = [x.clone().requires_grad_() for x in (a, b, state)]
    carried, outputs, borders = pieces[2], [], [0, *sorted(c for c in cuts if c < steps), steps]
    for start, stop in itertools.pairwise(borders):
        part = slice(start, stop)
        out, carried = linear_scan(pieces[0][:, part], pieces[1][:, part], carried, mask[:, part])
        outputs.append(out)
    joined = torch.cat(outputs, dim=1)
    torch.testing.assert_close(joined, h, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(carried, final, rtol=1e-12, atol=1e-12)
    piece_grads = torch.autograd.grad(joined.square().sum() + carried.sum(), pieces)
    torch.testing.assert_close(piece_grads, grads, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_outputs_do_not_share_memory(steps, dtype):
    a, b, state, *_ = make_inputs((2, steps, 3), dtype)
    h, final = linear_scan(a, b, state)
    kept = final.clone()
    h.zero_()
    assert torch.equal(final, kept)


def test_operator_passes_opcheck():
    for dtype in (torch.bfloat16, torch.float64, torch.complex64):
        a, b, state, mask, grad_h, grad_final = make_inputs((2, 5, 3), dtype, "random")
        backward_args = (a, b, state, mask, grad_h, grad_final, "torch")
        torch.library.opcheck(torch.ops.hf_recurrent.linear_scan_backward.default, backward_args)
        leaves = tuple(x.requires_grad_() for x in (a, b, state))
        torch.library.opcheck(torch.ops.hf_recurrent.linear_scan.default, (*leaves, mask, "auto"))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    def loss(a, b, state, mask):
        h, final = linear_scan(torch.sigmoid(a), b * 2, state, mask)
        return h.square().sum() + final.sum()

    # aot_eager builds the graph, with its backward, and runs it without a C++ compiler.
    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for steps in (1, 12, 13):
        a, b, state, mask, *_ = make_inputs((2, steps, 3), torch.float64, "random")
        leaves = [x.requires_grad_() for x in (a, b, state)]
        values = [f(*leaves, mask) for f in (loss, compiled)]
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*(torch.autograd.grad(value, leaves) for value in values))


def test_vmap_and_per_sample_gradients():
    samples = [make_inputs((2, 11, 3), torch.float64, "random", seed) for seed in range(4)]
    a, b, state, mask = (torch.stack([sample[i] for sample in samples]) for i in range(4))
    h, final = torch.vmap(linear_scan, in_dims=(0, 0, 0, None))(a, b, state, mask[0])
    for i in range(4):
        torch.testing.assert_close((h[i], final[i]), linear_scan(a[i], b[i], state[i], mask[0]))

    def loss(function, a, b, state, mask):
        h, final = function(a, b, state, mask)
        return h.square().sum() + final.sum()

    results = []
    for function in (linear_scan, linear_scan_reference):
        grad = torch.func.grad(lambda *x, function=function: loss(function, *x), argnums=(0, 1, 2))
        results.append(torch.vmap(grad)(a, b, state, mask))
    torch.testing.assert_close(*results)
    moved = torch.vmap(lambda x: torch.ops.hf_recurrent.linear_scan(x, b[0], state[0], None, "torch")[0], 3)
    torch.testing.assert_close(moved(a.movedim(0, 3))[2], linear_scan(a[2], b[0], state[0])[0])


def test_autocast_leaves_types_alone():
    a, b, state, mask, *_ = make_inputs((2, 11, 3), resets="random")
    for dtype_b in (torch.float32, torch.bfloat16):
        wanted = linear_scan(a, b.to(dtype_b), state, mask)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            eager = linear_scan(a, b.to(dtype_b), state, mask)
            operator = torch.ops.hf_recurrent.linear_scan(a, b.to(dtype_b).float(), state, mask, "auto")
        assert [x.dtype for x in eager] == [torch.float32, torch.float32]
        assert torch.equal(eager[0], wanted[0]) and torch.equal(operator[0], wanted[0])


def test_checkpointing():
    def recomputed(*args):
        return checkpoint(linear_scan, *args, use_reentrant=False)

    inputs = make_inputs((2, 40, 3), resets="random")
    actual, wanted = run(recomputed, *inputs), run(linear_scan, *inputs)
    assert all(torch.equal(x, y) for x, y in zip(actual, wanted, strict=True))


def test_meta_tensors_give_shapes():
    h, final = linear_scan(*(torch.empty(2, 7, 3, device="meta", dtype=torch.bfloat16) for _ in range(2)))
    assert h.shape == (2, 7, 3) and final.shape == (2, 3) and final.dtype == torch.float32 and h.is_meta


def test_the_file_may_be_loaded_twice(monkeypatch):
    """Once from the package, once as the code that came with a checkpoint."""
    code = ModuleType("code_of_a_checkpoint")
    code.__path__ = [str(Path(linear_scan_module.__file__).parents[1])]
    monkeypatch.setitem(sys.modules, code.__name__, code)
    copy = importlib.import_module("code_of_a_checkpoint.scan.linear_scan")
    inputs = make_inputs((2, 9, 3), resets="random")
    for module in (copy, linear_scan_module):
        assert_close(run(module.linear_scan, *inputs), expected(inputs), TOLERANCE[torch.float32])
        compiled = torch.compile(module.linear_scan, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*inputs[:4])[0], linear_scan(*inputs[:4])[0])


@pytest.mark.long
def test_importing_brings_in_no_compiler():
    """Without the package's other modules, since transformers' own import Triton where it is installed."""
    program = """
import importlib, sys, types
package = types.ModuleType("package")
package.__path__, sys.modules["package"] = [sys.argv[1]], package
module = importlib.import_module("package.scan.linear_scan")
assert "torch" in module.available_backends()
module.linear_scan(module.torch.rand(1, 4, 2), module.torch.rand(1, 4, 2))
assert "triton" not in sys.modules and "hf_recurrent.kernels.linear_scan_triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, Path(linear_scan_module.__file__).parents[1]], check=True)


def test_available_backends_run():
    assert set(available_backends()) >= {"reference", "torch"}
    inputs = make_inputs((1, 4, 3))
    for backend in ("reference", "torch"):
        assert_close(run(linear_scan, *inputs, backend=backend), expected(inputs), TOLERANCE[torch.float32])


def test_a_missing_backend_says_what_to_install(monkeypatch):
    monkeypatch.setitem(
        linear_scan_module._BACKEND_MODULES, "triton", ("hf_recurrent.kernels.absent", "pip install something")
    )
    for steps in (1, 4):
        with pytest.raises(ImportError, match=r"'triton' is not installed.*pip install something"):
            linear_scan(torch.rand(1, steps, 2), torch.rand(1, steps, 2), backend="triton")


BAD_INPUTS = {
    "dimensions": ({"a": torch.rand(4, 3)}, r"a has shape \(4, 3\)"),
    "b": ({"b": torch.rand(2, 4, 2)}, r"b has shape \(2, 4, 2\)"),
    "no steps": ({"a": torch.rand(2, 0, 3), "b": torch.rand(2, 0, 3)}, "must each be at least 1"),
    "integers": ({"b": torch.ones(2, 4, 3, dtype=torch.long)}, "b has type torch.int64"),
    "state": ({"initial_state": torch.rand(3, 3)}, r"initial_state has shape \(3, 3\)"),
    "complex state": ({"initial_state": torch.rand(2, 3, dtype=torch.complex64)}, "initial_state is complex"),
    "mask type": ({"reset_mask": torch.ones(2, 4)}, "reset_mask has type torch.float32"),
    "mask shape": ({"reset_mask": torch.ones(2, 5, dtype=torch.bool)}, r"reset_mask has shape \(2, 5\)"),
    "device": ({"b": torch.rand(2, 4, 3, device="meta")}, "b is on meta"),
    "backend": ({"backend": "cuda"}, "backend is 'cuda'"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs_are_named(case):
    changes, message = BAD_INPUTS[case]
    arguments = {"a": torch.rand(2, 4, 3), "b": torch.rand(2, 4, 3)} | changes
    with pytest.raises(ValueError, match=message):
        linear_scan(**arguments)
