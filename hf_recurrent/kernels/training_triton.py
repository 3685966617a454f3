"""The parts of a layer between its matrix products on a GPU, forward and backward: Triton kernels.

Names and arguments are as in `training_cpu.py`. Each function reads its inputs once and writes its results once;
tensors of one call may have different floating types, and all arithmetic is in float32, or in float64 if the first is.

Set TRITON_INTERPRET=1 before the first import to run the kernels on a CPU, slowly, for tests.

Shape letters: S state width. `width` is the last dimension, and `rows` are all others together.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear_scan_triton import _device_of

_WIDEST = 1 << 14  # elements of a row that the registers of one program hold
_TILE = 2048  # elements of a program that is not a single wider row
_CHANNELS = 128  # of a program of coefficients
_STEPS, _STRIP = 64, 64  # steps and channels of a program of the convolution
_PROGRAMS = 1056  # eight for each multiprocessor of a large GPU: of kernels that also sum over rows
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_DENSITY_AT_0 = tl.constexpr(1 / math.sqrt(2 * math.pi))
_SMALLEST_SQUARED_GAMMA = tl.constexpr(1e-12)


def supports(dtype: torch.dtype) -> bool:
    """True for the types that the kernels take."""
    return dtype in _TYPES


def supports_width(width: int) -> bool:
    """True for rows that fit into a program."""
    return 0 < width <= _WIDEST


# ---- Rows ----


@triton.jit
def _tile(first, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows from `first` on, the addresses of their elements, and which of both exist."""
    row, column = first.to(tl.int64) + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return row, row[:, None] * width + column[None, :], inside


@triton.jit
def _load(tensor, at, inside, DTYPE: tl.constexpr):
    return tl.load(tensor + at, mask=inside, other=0.0).to(DTYPE)


@triton.jit
def _store(tensor, at, value, inside):
    tl.store(tensor + at, value.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def _mean(x, width):
    return tl.sum(x, 1) / width


@triton.jit
def _moments(x, width, inside, eps):
    """Mean and 1/σ of each row."""
    mean = _mean(x, width)
    centred = tl.where(inside, x - mean[:, None], 0.0)
    return mean, 1 / tl.sqrt(_mean(centred * centred, width) + eps)


@triton.jit
def _norm_backward(grad, normed, scale, width):
    """The gradient of x from the gradient of its LayerNorm."""
    both = _mean(grad * normed, width)[:, None]
    return scale[:, None] * (grad - _mean(grad, width)[:, None] - normed * both)


@triton.jit
def _gelu(x):
    return 0.5 * x * (1 + tl.erf(x * _SQRT_HALF))


@triton.jit
def _gelu_derivative(x):
    return 0.5 * (1 + tl.erf(x * _SQRT_HALF)) + x * _DENSITY_AT_0 * tl.exp(-0.5 * x * x)


def _compute_type(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _rows_and_width(tensor: Tensor) -> tuple[int, int]:
    return tensor.numel() // tensor.shape[-1], tensor.shape[-1]


def _row_constants(width: int, dtype: torch.dtype) -> dict:
    block = triton.next_power_of_2(width)
    warps = 4 if block <= _TILE else 8 if block <= 4 * _TILE else 16
    return {"ROWS": max(1, _TILE // block), "BLOCK": block, "DTYPE": _TRITON_TYPES[dtype], "num_warps": warps}


def _like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)


def _run(kernel, grid: tuple[int, ...], *arguments: Tensor | int | float, **constants) -> None:
    """Start a kernel on the device of its first argument; tensors are contiguous there."""
    given = [one.contiguous() if isinstance(one, Tensor) else one for one in arguments]
    with _device_of(given[0]):
        kernel[grid](*given, **constants)


# ---- LN( GeLU(LN(gate)) ∘ LN(value) ) ----


@triton.jit
def _gated_norm(
    gate, value, to, moments, rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    row, at, inside = _tile(tl.program_id(0) * ROWS, rows, width, ROWS, BLOCK)
    g, v = _load(gate, at, inside, DTYPE), _load(value, at, inside, DTYPE)
    gate_mean, gate_scale = _moments(g, width, inside, eps)
    value_mean, value_scale = _moments(v, width, inside, eps)
    product = _gelu((g - gate_mean[:, None]) * gate_scale[:, None]) * (v - value_mean[:, None]) * value_scale[:, None]
    product = tl.where(inside, product, 0.0)
    mean, scale = _moments(product, width, inside, eps)
    _store(to, at, (product - mean[:, None]) * scale[:, None], inside)
    exists = row < rows
    _store(moments, row, gate_mean, exists)
    _store(moments, rows + row, gate_scale, exists)
    _store(moments, 2 * rows + row, value_mean, exists)
    _store(moments, 3 * rows + row, value_scale, exists)
    _store(moments, 4 * rows + row, mean, exists)
    _store(moments, 5 * rows + row, scale, exists)


@triton.jit
def _gated_norm_backward(
    gate, value, moments, grad, grad_gate, grad_value, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row, at, inside = _tile(tl.program_id(0) * ROWS, rows, width, ROWS, BLOCK)
    g, v, dy = _load(gate, at, inside, DTYPE), _load(value, at, inside, DTYPE), _load(grad, at, inside, DTYPE)
    exists = row < rows
    gate_mean, gate_scale = _load(moments, row, exists, DTYPE), _load(moments, rows + row, exists, DTYPE)
    value_mean, value_scale = (
        _load(moments, 2 * rows + row, exists, DTYPE),
        _load(moments, 3 * rows + row, exists, DTYPE),
    )
    mean, scale = _load(moments, 4 * rows + row, exists, DTYPE), _load(moments, 5 * rows + row, exists, DTYPE)
    normed_gate = tl.where(inside, (g - gate_mean[:, None]) * gate_scale[:, None], 0.0)
    normed_value = tl.where(inside, (v - value_mean[:, None]) * value_scale[:, None], 0.0)
    opened = _gelu(normed_gate)
    normed = tl.where(inside, (opened * normed_value - mean[:, None]) * scale[:, None], 0.0)
    of_product = tl.where(inside, _norm_backward(dy, normed, scale, width), 0.0)
    of_value = _norm_backward(of_product * opened, normed_value, value_scale, width)
    of_gate = of_product * normed_value * _gelu_derivative(normed_gate)
    _store(grad_value, at, of_value, inside)
    _store(grad_gate, at, _norm_backward(of_gate, normed_gate, gate_scale, width), inside)


def gated_norm(gate: Tensor, value: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """LN( GeLU(LN(gate)) ∘ LN(value) ), and means and 1/σ of its three norms, (6, rows), for the backward pass."""
    rows, width = _rows_and_width(gate)
    dtype = _compute_type(gate)
    output, moments = _like(gate), torch.empty(6, rows, dtype=dtype, device=gate.device)
    constants = _row_constants(width, dtype)
    grid = (triton.cdiv(rows, constants["ROWS"]),)
    _run(_gated_norm, grid, gate, value, output, moments, rows, width, eps, **constants)
    return output, moments


def gated_norm_backward(
    gate: Tensor, value: Tensor, moments: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and value."""
    rows, width = _rows_and_width(gate)
    grads = _like(gate), _like(value)
    constants = _row_constants(width, _compute_type(gate))
    grid = (triton.cdiv(rows, constants["ROWS"]),)
    _run(_gated_norm_backward, grid, gate, value, moments, grad, *grads, rows, width, **constants)
    return grads


# ---- GeLU(gate) ∘ value ----


@triton.jit
def _gated_gelu(gate, value, to, elements, TILE: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < elements
    _store(to, at, _gelu(_load(gate, at, inside, DTYPE)) * _load(value, at, inside, DTYPE), inside)


@triton.jit
def _gated_gelu_backward(gate, value, grad, grad_gate, grad_value, elements, TILE: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < elements
    g, dy = _load(gate, at, inside, DTYPE), _load(grad, at, inside, DTYPE)
    _store(grad_value, at, dy * _gelu(g), inside)
    _store(grad_gate, at, dy * _load(value, at, inside, DTYPE) * _gelu_derivative(g), inside)


def gated_gelu(gate: Tensor, value: Tensor) -> Tensor:
    """GeLU(gate) ∘ value, element by element."""
    output = _like(gate, torch.promote_types(gate.dtype, value.dtype))
    constants = {"TILE": _TILE, "DTYPE": _TRITON_TYPES[_compute_type(output)]}
    _run(_gated_gelu, (triton.cdiv(gate.numel(), _TILE),), gate, value, output, gate.numel(), **constants)
    return output


def gated_gelu_backward(gate: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and value."""
    grads = _like(gate), _like(value)
    constants = {"TILE": _TILE, "DTYPE": _TRITON_TYPES[_compute_type(grad)]}
    grid = (triton.cdiv(gate.numel(), _TILE),)
    _run(_gated_gelu_backward, grid, gate, value, grad, *grads, gate.numel(), **constants)
    return grads


# ---- Coefficients of a gated linear recurrent unit ----


@triton.jit
def _one_minus_exp(x):
    """1 - exp(x) of x ≤ 0, exact where x → 0."""
    series = tl.full(x.shape, 1 / 13, x.dtype)
    for i in tl.static_range(12, 1, -1):
        series = (1 + x * series) / i
    return tl.where(x > -0.5, -x * (1 + x * series), 1 - tl.exp(x))


@triton.jit
def _coefficients_tile(first, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Addresses of some rows of the channels of this program, and which of them exist."""
    row, channel = first.to(tl.int64) + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row[:, None] * width + channel[None, :], (row < rows)[:, None] & (channel < width)[None, :]


@triton.jit
def _gate_coefficients(
    recurrence_gate, rate, input_gate, inputs, decay, scaled, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = _coefficients_tile(tl.program_id(0) * ROWS, rows, width, ROWS, BLOCK)
    speed = _load(rate, channel, channel < width, DTYPE)[None, :]
    log_decay = -speed * tl.sigmoid(_load(recurrence_gate, at, inside, DTYPE))
    gamma = tl.sqrt(tl.maximum(_one_minus_exp(2 * log_decay), _SMALLEST_SQUARED_GAMMA))
    _store(decay, at, tl.exp(log_decay), inside)
    _store(scaled, at, gamma * _load(input_gate, at, inside, DTYPE) * _load(inputs, at, inside, DTYPE), inside)


@triton.jit
def _gate_coefficients_backward(
    recurrence_gate, rate, input_gate, inputs, grad_decay, grad_scaled,
    grad_recurrence_gate, grad_input_gate, grad_inputs, grad_rate, rows, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    speed = _load(rate, channel, channel < width, DTYPE)[None, :]
    of_rate = tl.zeros((ROWS, BLOCK), DTYPE)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        at, inside = _coefficients_tile(first + tl.zeros((1,), tl.int32), rows, width, ROWS, BLOCK)
        gate = tl.sigmoid(_load(recurrence_gate, at, inside, DTYPE))
        g, u = _load(input_gate, at, inside, DTYPE), _load(inputs, at, inside, DTYPE)
        da, db = _load(grad_decay, at, inside, DTYPE), _load(grad_scaled, at, inside, DTYPE)
        log_decay = -speed * gate
        decay, squared = tl.exp(log_decay), _one_minus_exp(2 * log_decay)
        gamma = tl.sqrt(tl.maximum(squared, _SMALLEST_SQUARED_GAMMA))
        _store(grad_input_gate, at, db * gamma * u, inside)
        _store(grad_inputs, at, db * gamma * g, inside)
        # dγ / d log r = -r² / γ
        of_gamma = tl.where(squared < _SMALLEST_SQUARED_GAMMA, 0.0, db * g * u * decay / gamma)
        of_log_decay = (da - of_gamma) * decay * gate
        of_rate -= tl.where(inside, of_log_decay, 0.0)
        _store(grad_recurrence_gate, at, of_log_decay * speed * (gate - 1), inside)
    _store(grad_rate, tl.program_id(0) * width + channel, tl.sum(of_rate, 0), channel < width)


def _coefficient_constants(dtype: torch.dtype) -> dict:
    return {"ROWS": _TILE // 2 // _CHANNELS, "BLOCK": _CHANNELS, "DTYPE": _TRITON_TYPES[dtype]}


def gate_coefficients(
    recurrence_gate: Tensor, rate: Tensor, input_gate: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """r = exp(-rate ∘ σ(recurrence_gate)) and sqrt(1 - r²) ∘ input_gate ∘ inputs; rate is (S,), the others (…, S)."""
    rows, width = _rows_and_width(recurrence_gate)
    dtype = _compute_type(recurrence_gate)
    results = _like(recurrence_gate, dtype), _like(recurrence_gate, dtype)
    constants = _coefficient_constants(dtype)
    grid = triton.cdiv(rows, constants["ROWS"]), triton.cdiv(width, _CHANNELS)
    given = recurrence_gate, rate, input_gate, inputs
    _run(_gate_coefficients, grid, *given, *results, rows, width, **constants)
    return results


def gate_coefficients_backward(
    recurrence_gate: Tensor,
    rate: Tensor,
    input_gate: Tensor,
    inputs: Tensor,
    grad_decay: Tensor,
    grad_scaled: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the four inputs."""
    rows, width = _rows_and_width(recurrence_gate)
    dtype = _compute_type(recurrence_gate)
    constants, strips = _coefficient_constants(dtype), triton.cdiv(width, _CHANNELS)
    programs = min(triton.cdiv(rows, constants["ROWS"]), triton.cdiv(_PROGRAMS, strips))
    given = recurrence_gate, rate, input_gate, inputs, grad_decay, grad_scaled
    grads = [_like(tensor) for tensor in (recurrence_gate, input_gate, inputs)]
    of_rate = torch.empty(programs, width, dtype=dtype, device=rate.device)
    _run(_gate_coefficients_backward, (programs, strips), *given, *grads, of_rate, rows, width, **constants)
    return grads[0], of_rate.sum(0).to(rate.dtype), *grads[1:]


# ---- RMSNorm ----


@triton.jit
def _rms_norm(
    x, weight, to, scales, rows, width, eps,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    row, at, inside = _tile(tl.program_id(0) * ROWS, rows, width, ROWS, BLOCK)
    numbers = _load(x, at, inside, DTYPE)
    scale = 1 / tl.sqrt(_mean(numbers * numbers, width) + eps)
    normed = numbers * scale[:, None]
    if HAS_WEIGHT:
        column = tl.arange(0, BLOCK)
        normed *= _load(weight, column, column < width, DTYPE)[None, :]
    _store(to, at, normed, inside)
    _store(scales, row, scale, row < rows)


@triton.jit
def _rms_norm_backward(
    x, weight, scales, grad, grad_x, grad_weight, rows, width,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    of_weight = tl.zeros((ROWS, BLOCK), DTYPE)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row, at, inside = _tile(first + tl.zeros((1,), tl.int32), rows, width, ROWS, BLOCK)
        scale = _load(scales, row, row < rows, DTYPE)[:, None]
        normed, dy = _load(x, at, inside, DTYPE) * scale, _load(grad, at, inside, DTYPE)
        if HAS_WEIGHT:
            of_weight += dy * normed
            dy *= _load(weight, column, column < width, DTYPE)[None, :]
        _store(grad_x, at, scale * (dy - normed * _mean(dy * normed, width)[:, None]), inside)
    if HAS_WEIGHT:
        _store(grad_weight, tl.program_id(0) * width + column, tl.sum(of_weight, 0), column < width)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, in autocast's type where it is on, and 1 / RMS of each row."""
    rows, width = _rows_and_width(x)
    dtype = _compute_type(x)
    rounds = x.is_cuda and torch.is_autocast_enabled("cuda") and dtype is torch.float32
    output, scales = _like(x, torch.get_autocast_dtype("cuda") if rounds else x.dtype), x.new_empty(rows, dtype=dtype)
    constants = _row_constants(width, dtype) | {"HAS_WEIGHT": weight is not None}
    grid = (triton.cdiv(rows, constants["ROWS"]),)
    _run(_rms_norm, grid, x, x if weight is None else weight, output, scales, rows, width, eps, **constants)
    return output, scales


def rms_norm_backward(
    x: Tensor, weight: Tensor | None, scales: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weight."""
    rows, width = _rows_and_width(x)
    dtype = _compute_type(x)
    constants, grad_x = _row_constants(width, dtype) | {"HAS_WEIGHT": weight is not None}, _like(x)
    programs = min(triton.cdiv(rows, constants["ROWS"]), _PROGRAMS)
    of_weight = None if weight is None else torch.empty(programs, width, dtype=dtype, device=x.device)
    weights = (x, x) if weight is None else (weight, of_weight)
    _run(_rms_norm_backward, (programs,), x, weights[0], scales, grad, grad_x, weights[1], rows, width, **constants)
    return grad_x, None if weight is None else of_weight.sum(0).to(weight.dtype)


# ---- Convolution over time ----


@triton.jit
def _is_one_episode(resets, stream, step, T, exists, HAS_RESETS: tl.constexpr):
    """`exists`, where no reset comes before a step of the block."""
    if HAS_RESETS:
        exists &= tl.load(resets + stream * T + step, mask=exists & (step >= 0), other=0) == 0
    return exists


@triton.jit
def _convolution(
    x, taps, weight, resets, to, T, S,
    K: tl.constexpr, HAS_RESETS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    channel, stream = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(2).to(tl.int64)
    step, is_channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS), channel < S
    exists = step < T
    total = tl.zeros((ROWS, BLOCK), DTYPE)
    for lag in tl.static_range(K):
        source = step - lag
        inside = exists[:, None] & is_channel[None, :]
        at = (stream * T + source)[:, None] * S + channel[None, :]
        before = (stream * (K - 1) + source + K - 1)[:, None] * S + channel[None, :]
        read = _load(x, at, inside & (source >= 0)[:, None], DTYPE)
        if lag > 0:
            read += _load(taps, before, inside & (source < 0)[:, None], DTYPE)
        total += read * _load(weight, lag * S + channel, is_channel, DTYPE)[None, :]
        exists = _is_one_episode(resets, stream, source, T, exists, HAS_RESETS)
    at = (stream * T + step)[:, None] * S + channel[None, :]
    _store(to, at, total, (step < T)[:, None] & is_channel[None, :])


@triton.jit
def _convolution_backward(
    x, taps, weight, resets, grad, grad_x, grad_taps, grad_weight, T, S,
    K: tl.constexpr, HAS_RESETS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Gradients of some steps, from K - 1 before the block on, and their part of the weight's."""
    channel, stream = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(2).to(tl.int64)
    source, is_channel = tl.program_id(0) * ROWS + tl.arange(0, ROWS) - (K - 1), channel < S
    in_block, exists = source >= 0, source < T
    inside = exists[:, None] & is_channel[None, :]
    at = (stream * T + source)[:, None] * S + channel[None, :]
    before = (stream * (K - 1) + source + K - 1)[:, None] * S + channel[None, :]
    read = _load(x, at, inside & in_block[:, None], DTYPE) + _load(taps, before, inside & ~in_block[:, None], DTYPE)
    total = tl.zeros((ROWS, BLOCK), DTYPE)
    part = (stream * tl.num_programs(0) + tl.program_id(0)) * K
    for lag in tl.static_range(K):
        step = source + lag
        exists &= step < T
        if lag > 0:
            exists = _is_one_episode(resets, stream, step, T, exists, HAS_RESETS)
        of_step = exists & (step >= 0)
        at_step = (stream * T + step)[:, None] * S + channel[None, :]
        dy = _load(grad, at_step, of_step[:, None] & is_channel[None, :], DTYPE)
        total += dy * _load(weight, lag * S + channel, is_channel, DTYPE)[None, :]
        _store(grad_weight, (part + lag) * S + channel, tl.sum(dy * read, 0), is_channel)
    _store(grad_x, at, total, inside & in_block[:, None])
    _store(grad_taps, before, total, inside & ~in_block[:, None])


def _convolution_given(
    inputs: Tensor, taps: Tensor, weight: Tensor, reset_mask: Tensor | None
) -> tuple[list[Tensor], dict]:
    resets = inputs if reset_mask is None else reset_mask.view(torch.uint8)
    constants = {"K": weight.shape[0], "HAS_RESETS": reset_mask is not None, "ROWS": _STEPS, "BLOCK": _STRIP}
    constants |= {"DTYPE": _TRITON_TYPES[_compute_type(inputs)], "num_warps": 8}
    return [inputs, taps, weight, resets], constants


def temporal_convolution(inputs: Tensor, taps: Tensor, weight: Tensor, reset_mask: Tensor | None) -> Tensor:
    """y_t = Σ_k w_k ∘ x_{t-k}: inputs (B,T,S), the inputs before (B,K-1,S), weights (K,S), bool (B,T) -> (B,T,S)."""
    batch, steps, width = inputs.shape
    given, constants = _convolution_given(inputs, taps, weight, reset_mask)
    output = _like(inputs)
    grid = triton.cdiv(steps, _STEPS), triton.cdiv(width, _STRIP), batch
    _run(_convolution, grid, *given, output, steps, width, **constants)
    return output


def temporal_convolution_backward(
    inputs: Tensor, taps: Tensor, weight: Tensor, reset_mask: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of inputs, taps and weight."""
    batch, steps, width = inputs.shape
    given, constants = _convolution_given(inputs, taps, weight, reset_mask)
    programs = triton.cdiv(steps + weight.shape[0] - 1, _STEPS)
    grads = _like(inputs), _like(taps)
    of_weight = torch.empty(batch * programs, *weight.shape, dtype=_compute_type(inputs), device=inputs.device)
    grid = programs, triton.cdiv(width, _STRIP), batch
    _run(_convolution_backward, grid, *given, grad, *grads, of_weight, steps, width, **constants)
    return *grads, of_weight.sum(0).to(weight.dtype)
