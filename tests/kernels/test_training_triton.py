"""The Triton parts of a layer against plain torch: on a GPU where there is one, elsewhere through the interpreter."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from hf_recurrent.modeling.block.gated_norm import gated_norm
from hf_recurrent.modeling.block.recurrent_blocks import gated_gelu, temporal_convolution
from hf_recurrent.modeling.units.gate_coefficients import gate_coefficients

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="no GPU here: test_in_the_interpreter runs this in another process"
)
TOLERANCE = {torch.float64: 1e-11, torch.float32: 4e-6, torch.bfloat16: 2**-7}
SHAPES = [(1, 1), (3, 5), (7, 33), (2, 70, 192), (3, 2100)]
KERNELS = [
    f"{part}{direction}"
    for part in ("_gated_norm", "_gated_gelu", "_gate_coefficients", "_rms_norm", "_convolution")
    for direction in ("", "_backward")
]
WIDE_TENSORS = {"moments", "rate", "decay", "scaled", "grad_decay", "grad_scaled", "grad_rate", "weight", "scales"}
WIDE_TENSORS |= {"grad_weight", "x"}
each_type = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def numbers(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def assert_near(found, expected, dtype):
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        y = y.detach().double()
        assert float((x.double() - y).abs().max()) <= TOLERANCE[dtype] * max(1.0, float(y.abs().max()))


def expected_of(function, inputs, grads):
    """Outputs of a function in plain torch, and gradients, in float64."""
    leaves = [tensor.double().requires_grad_() for tensor in inputs]
    with torch.autocast(DEVICE, enabled=False):
        outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs, torch.autograd.grad(outputs, leaves, [grad.double() for grad in grads])


@runs_kernels
@each_type
@each_shape
def test_gated_norm(shape, dtype):
    from hf_recurrent.kernels import training_triton as kernels

    gate, value = numbers(*shape, dtype=dtype), 2 * numbers(*shape, dtype=wide(dtype), seed=1) + 0.5
    grad = numbers(*shape, dtype=dtype, seed=2)
    outputs, grads = expected_of(lambda g, v: gated_norm(g, v, 1e-3), (gate, value), (grad,))
    output, moments = kernels.gated_norm(gate, value, 1e-3)
    found = kernels.gated_norm_backward(gate, value, moments, grad, 1e-3)
    assert [x.dtype for x in (output, *found)] == [dtype, dtype, wide(dtype)]
    assert_near((output, *found), (*outputs, *grads), dtype)


@runs_kernels
@each_type
@each_shape
def test_gated_gelu(shape, dtype):
    from hf_recurrent.kernels import training_triton as kernels

    gate, value, grad = (numbers(*shape, dtype=dtype, seed=seed) for seed in range(3))
    outputs, grads = expected_of(gated_gelu, (gate, value), (grad,))
    found = (kernels.gated_gelu(gate, value), *kernels.gated_gelu_backward(gate, value, grad))
    assert all(x.dtype is dtype for x in found)
    assert_near(found, (*outputs, *grads), dtype)


@runs_kernels
@each_type
@each_shape
def test_gate_coefficients(shape, dtype):
    from hf_recurrent.kernels import training_triton as kernels

    gate, input_gate, inputs = (3 * numbers(*shape, dtype=dtype, seed=seed) for seed in range(3))
    rate = numbers(shape[-1], dtype=wide(dtype), seed=3).mul(4).exp()  # decays from 1 - 1e-6 to 0
    given = (gate, rate, input_gate, inputs)
    grads = [numbers(*shape, dtype=wide(dtype), seed=seed) for seed in (4, 5)]
    outputs, expected = expected_of(gate_coefficients, given, grads)
    found = kernels.gate_coefficients(*given)
    assert_near(found, outputs, torch.float32 if dtype is torch.bfloat16 else dtype)
    found = kernels.gate_coefficients_backward(*given, *grads)
    assert [x.dtype for x in found] == [x.dtype for x in given]
    assert_near(found, expected, dtype)


@runs_kernels
@each_type
@each_shape
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm(shape, dtype, has_weight):
    from hf_recurrent.kernels import training_triton as kernels

    x, grad = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, seed=1)
    weight = numbers(shape[-1], dtype=wide(dtype), seed=2) if has_weight else None
    given = (x, weight) if has_weight else (x,)
    outputs, expected = expected_of(
        lambda x, *weight: torch.nn.functional.rms_norm(x, shape[-1:], *weight, eps=1e-3), given, (grad,)
    )
    output, scales = kernels.rms_norm(x, weight, 1e-3)
    found = kernels.rms_norm_backward(x, weight, scales, grad, 1e-3)
    assert output.dtype is dtype
    assert_near((output, *found[: len(given)]), (*outputs, *expected), dtype)


@runs_kernels
@each_type
@pytest.mark.parametrize("resets", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (2, 3, 5, 4), (3, 40, 200, 3), (2, 200, 3, 4)], ids=str)
def test_temporal_convolution(sizes, resets, dtype):
    from hf_recurrent.kernels import training_triton as kernels

    batch, steps, width, taken = sizes
    inputs, grad = numbers(batch, steps, width, dtype=dtype), numbers(batch, steps, width, dtype=dtype, seed=1)
    taps = numbers(batch, taken - 1, width, dtype=dtype, seed=2)
    weight = numbers(taken, width, dtype=wide(dtype), seed=3)
    mask = torch.rand(batch, steps, generator=torch.Generator().manual_seed(4)).to(DEVICE) < resets
    mask = mask if resets else None
    given = (inputs, taps, weight)
    outputs, expected = expected_of(lambda *given: temporal_convolution(*given, mask)[0], given, (grad,))
    found = kernels.temporal_convolution(*given, mask), *kernels.temporal_convolution_backward(*given, mask, grad)
    assert [x.dtype for x in found] == [dtype, dtype, dtype, wide(dtype)]
    assert_near(found, (*outputs, *expected), dtype)


@runs_kernels
def test_rows_that_do_not_lie_in_order():
    from hf_recurrent.kernels import training_triton as kernels

    gate, value = (numbers(4, 6, 8, dtype=torch.float64, seed=seed).transpose(0, 1) for seed in range(2))
    outputs, _ = expected_of(gated_gelu, (gate, value), (torch.ones_like(gate),))
    assert_near((kernels.gated_gelu(gate, value),), outputs, torch.float64)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("narrow", ["fp32", "bf16", "fp64"])
def test_kernels_compile_for_a_gpu(narrow):
    """To machine code, which needs no GPU: the interpreter accepts more than the compiler does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from hf_recurrent.kernels import training_triton as kernels

    wide = "fp64" if narrow == "fp64" else "fp32"
    constants = {"HAS_WEIGHT": True, "HAS_RESETS": True, "ROWS": 2, "BLOCK": 64, "TILE": 128, "K": 4}
    constants["DTYPE"] = kernels.tl.float64 if narrow == "fp64" else kernels.tl.float32
    for name in KERNELS:
        kernel = getattr(kernels, name)
        signature = {}
        for argument in kernel.arg_names:
            if argument in constants:
                signature[argument] = "constexpr"
            elif argument in ("rows", "width", "elements", "T", "S"):
                signature[argument] = "i32"
            elif argument == "eps":
                signature[argument] = "fp32"
            else:
                kind = wide if argument in WIDE_TENSORS else narrow
                signature[argument] = "*u8" if argument == "resets" else f"*{kind}"
        taken = {argument: constants[argument] for argument in kernel.arg_names if argument in constants}
        compiled = compile(ASTSource(kernel, signature, taken), target=GPUTarget("cuda", 90, 32))
        assert len(compiled.asm["cubin"]) > 1000


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
