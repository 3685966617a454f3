"""The Triton kernels: on the GPU where there is one, through Triton's interpreter in a process of its own elsewhere.

Triton reads TRITON_INTERPRET when it is imported, and torch.compile in other tests may have imported it before.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from hf_recurrent.modeling.scan.linear_scan import available_backends, linear_scan, linear_scan_reference

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs_kernels = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="no GPU here: test_in_the_interpreter runs this in another process"
)
# One rounding of outputs and of the h that da is built from (see test_linear_scan.py).
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 4 * 2**-11, torch.bfloat16: 4 * 2**-8}


def inputs_of(shape, dtype, resets):
    generator = torch.Generator().manual_seed(0)
    batch, steps, width = shape
    wide = torch.promote_types(dtype, torch.float32)
    a = torch.rand(shape, generator=generator, dtype=torch.float64).sqrt()
    b, grad_h = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    state, grad_final = (torch.randn(batch, width, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(batch, steps, generator=generator) < {"none": 0.0, "random": 0.2, "all": 1.1}[resets]
    numbers = (a.to(dtype), b.to(dtype), state.to(wide), grad_h.to(dtype), grad_final.to(wide))
    a, b, state, grad_h, grad_final = (x.to(DEVICE) for x in numbers)
    return a, b, state, None if resets == "none" else mask.to(DEVICE), grad_h, grad_final


def expected(a, b, state, mask, grad_h, grad_final):
    leaves = [x.double().requires_grad_() for x in (a, b, state)]
    outputs = linear_scan_reference(*leaves, mask)
    return *outputs, *torch.autograd.grad(outputs, leaves, (grad_h.double(), grad_final.double()))


def assert_close(actual, wanted, tolerance):
    for name, x, y in zip(("h", "final", "grad a", "grad b", "grad state"), actual, wanted, strict=True):
        error = (x.double() - y).abs().max() / y.abs().max().clamp(min=1)
        assert error <= tolerance, f"{name}: relative error {error:.2e}"


@runs_kernels
@pytest.mark.parametrize("resets", ["none", "random", "all"])
@pytest.mark.parametrize(
    "shape, chunk",
    [((1, 1, 1), None), ((1, 1, 1), 1), ((2, 12, 70), None), ((2, 12, 70), 5)]
    + [((1, 13, 3), chunk) for chunk in (None, 1, 3, 5)],
    ids=str,
)
def test_serial_and_three_passes(shape, resets, chunk):
    from hf_recurrent.kernels import linear_scan_triton as kernels

    a, b, state, mask, grad_h, grad_final = inputs = inputs_of(shape, torch.float32, resets)
    h, final = kernels.scan_forward(a, b, state, mask, chunk=chunk)
    grads = kernels.scan_backward(a, h, state, mask, grad_h, grad_final, chunk=chunk)
    assert_close((h, final, *grads), expected(*inputs), TOLERANCE[torch.float32])


@runs_kernels
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_types_through_the_public_function(dtype):
    inputs = inputs_of((2, 9, 5), dtype, "random")
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    outputs = linear_scan(*leaves, inputs[3], backend="triton")
    grads = torch.autograd.grad(outputs, leaves, inputs[4:])
    assert [x.dtype for x in (*outputs, *grads)] == [dtype, inputs[2].dtype, dtype, dtype, inputs[2].dtype]
    assert_close((*outputs, *grads), expected(*inputs), TOLERANCE[dtype])


@runs_kernels
def test_long_enough_to_be_chunked():
    from hf_recurrent.kernels import linear_scan_triton as kernels

    lengths = [kernels.chunk_length(*shape) for shape in ((1, 520, 2), (1, 500, 2), (512, 4096, 768))]
    assert lengths == [128, 500, 4096]
    inputs = inputs_of((1, 520, 2), torch.float32, "random")
    a, b, state = (x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in inputs[:3])
    outputs = linear_scan(a, b, state, inputs[3], backend="triton")
    grads = torch.autograd.grad(outputs, (a, b, state), inputs[4:])
    assert_close((*outputs, *grads), expected(*inputs), TOLERANCE[torch.float32])


@runs_kernels
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_reset_forgets_infinities_and_nan(chunk):
    from hf_recurrent.kernels import linear_scan_triton as kernels

    a, b, state, mask, grad_h, grad_final = inputs_of((2, 12, 3), torch.float32, "random")
    mask[:] = False
    mask[0, 0] = mask[1, 6] = True
    state[0, 0], state[0, 1], b[1, 5] = float("nan"), float("inf"), float("nan")
    h, final = kernels.scan_forward(a, b, state, mask, chunk=chunk)
    grads = kernels.scan_backward(a, h, state, mask, grad_h, grad_final, chunk=chunk)
    assert h[0].isfinite().all() and h[1, 6:].isfinite().all() and final.isfinite().all()
    assert (grads[0][mask] == 0).all() and (grads[2][0] == 0).all() and grads[1].isfinite().all()


@runs_kernels
def test_refuses_complex_numbers():
    a = torch.rand(1, 4, 2, dtype=torch.complex64, device=DEVICE)
    with pytest.raises(RuntimeError, match="real numbers"):
        linear_scan(a, a, backend="triton")


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the kernels run in this process")
def test_refuses_a_cpu_tensor():
    assert "triton" not in available_backends()
    with pytest.raises(RuntimeError, match="need tensors on a GPU, not on 'cpu'"):
        linear_scan(torch.rand(1, 4, 2), torch.rand(1, 4, 2), backend="triton")


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("summary", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_kernels_compile_for_a_gpu(dtype, summary):
    """To machine code, which needs no GPU: the interpreter accepts more than the compiler does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from hf_recurrent.kernels import linear_scan_triton as kernels

    narrow = {"a", "b", "grad_h"} | (set() if summary else {"h", "grad_a", "grad_b"})
    constants = {"SUMMARY": summary, "HAS_RESETS": True, "REVERSE": True, "STRIP": 64, "ROWS": 4}
    for name in ("_combine", "_forward", "_backward"):
        kernel = getattr(kernels, name)
        signature = {}
        for argument in kernel.arg_names:
            if argument in constants:
                signature[argument] = "constexpr"
            elif argument in ("T", "S", "length", "chunks"):
                signature[argument] = "i32"
            elif argument == "resets":
                signature[argument] = "*u8"
            else:
                signature[argument] = "*" + (dtype if argument in narrow or dtype == "fp64" else "fp32")
        used = {key: value for key, value in constants.items() if key in signature}
        target = GPUTarget("cuda", 90, 32)
        compiled = compile(ASTSource(kernel, signature, used), target=target, options={"num_warps": 1}).asm
        assert "cubin" in compiled
        # Loads of both inputs are issued before the first result is stored.
        assert compiled["ptx"].split("st.global")[0].count("ld.global") >= 2 * constants["ROWS"], name


@pytest.mark.long
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="the kernels run in this process")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-1000:]
