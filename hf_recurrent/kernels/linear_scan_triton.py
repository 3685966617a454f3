"""The linear recurrence on a GPU: Triton kernels behind `linear_scan(backend="triton")`.

One program walks a strip of channels of one stream through time, with the state in registers (float32 or float64).
Where streams and channels are too few to fill the GPU, time is cut into chunks and three passes run: every chunk from
zero, which leaves its last row and the product of its decays; a scan over the chunks; and every chunk again from
its true start. The backward pass is the same towards the past.

Set TRITON_INTERPRET=1 before the first import to run the kernels on a CPU, slowly, for tests.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_STRIP = 64  # channels of one program: two a thread of a warp, so loads of one row are whole cache lines
_ENOUGH_PROGRAMS = 1024  # several for each of the 100 to 150 multiprocessors of a large GPU
_SHORTEST_CHUNK = 32


@triton.jit
def _forward_summary(a, b, resets, product, local, T, S, L, C, HAS_RESETS: tl.constexpr, STRIP: tl.constexpr):
    """Each chunk from zero: the product of its decays and its last row, both (B,C,S)."""
    channel = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    inside = channel < S
    stream, chunk = (tl.program_id(1) // C).to(tl.int64), tl.program_id(1) % C
    state = tl.full((STRIP,), 0.0, product.dtype.element_ty)
    decay = tl.full((STRIP,), 1.0, product.dtype.element_ty)
    for t in range(chunk * L, min(chunk * L + L, T)):
        at = (stream * T + t) * S + channel
        a_t = tl.load(a + at, mask=inside, other=0.0).to(state.dtype)
        b_t = tl.load(b + at, mask=inside, other=0.0).to(state.dtype)
        if HAS_RESETS:
            reset = tl.load(resets + stream * T + t) != 0
            state = tl.where(reset, 0.0, state)
            decay = tl.where(reset, 0.0, decay)
        state = a_t * state + b_t
        decay = a_t * decay
    at = (stream * C + chunk) * S + channel
    tl.store(product + at, decay, mask=inside)
    tl.store(local + at, state, mask=inside)


@triton.jit
def _backward_summary(a, grad_h, resets, product, local, T, S, L, C, HAS_RESETS: tl.constexpr, STRIP: tl.constexpr):
    """The same towards the past, for what each chunk passes on to the state before it."""
    channel = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    inside = channel < S
    stream, chunk = (tl.program_id(1) // C).to(tl.int64), tl.program_id(1) % C
    carried = tl.full((STRIP,), 0.0, product.dtype.element_ty)
    decay = tl.full((STRIP,), 1.0, product.dtype.element_ty)
    stop = min(chunk * L + L, T)
    for i in range(stop - chunk * L):
        t = stop - 1 - i
        at = (stream * T + t) * S + channel
        a_t = tl.load(a + at, mask=inside, other=0.0).to(carried.dtype)
        grad_t = tl.load(grad_h + at, mask=inside, other=0.0).to(carried.dtype)
        carried = a_t * (grad_t + carried)
        decay = a_t * decay
        if HAS_RESETS:
            reset = tl.load(resets + stream * T + t) != 0
            carried = tl.where(reset, 0.0, carried)
            decay = tl.where(reset, 0.0, decay)
    at = (stream * C + chunk) * S + channel
    tl.store(product + at, decay, mask=inside)
    tl.store(local + at, carried, mask=inside)


@triton.jit
def _combine(product, local, first, starts, S, C, REVERSE: tl.constexpr, STRIP: tl.constexpr):
    """What enters each chunk (B,C,S), from what enters the first one (B,S)."""
    channel = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    inside = channel < S
    stream = tl.program_id(1).to(tl.int64)
    state = tl.load(first + stream * S + channel, mask=inside, other=0.0)
    for i in range(C):
        chunk = i
        if REVERSE:
            chunk = C - 1 - i
        at = (stream * C + chunk) * S + channel
        tl.store(starts + at, state, mask=inside)
        decay = tl.load(product + at, mask=inside, other=0.0)
        ended = tl.load(local + at, mask=inside, other=0.0)
        # A product of zero (a reset) passes nothing on, not even a NaN; a state of zero stays one even where the
        # product of the decays overflowed.
        state = ended + tl.where((decay == 0.0) | (state == 0.0), 0.0, decay * state)


@triton.jit
def _forward(a, b, resets, starts, h, final, T, S, L, C, HAS_RESETS: tl.constexpr, STRIP: tl.constexpr):
    channel = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    inside = channel < S
    stream, chunk = (tl.program_id(1) // C).to(tl.int64), tl.program_id(1) % C
    state = tl.load(starts + (stream * C + chunk) * S + channel, mask=inside, other=0.0)
    for t in range(chunk * L, min(chunk * L + L, T)):
        at = (stream * T + t) * S + channel
        a_t = tl.load(a + at, mask=inside, other=0.0).to(state.dtype)
        b_t = tl.load(b + at, mask=inside, other=0.0).to(state.dtype)
        if HAS_RESETS:
            state = tl.where(tl.load(resets + stream * T + t) != 0, 0.0, state)
        state = a_t * state + b_t
        tl.store(h + at, state.to(h.dtype.element_ty), mask=inside)
    if chunk == C - 1:
        tl.store(final + stream * S + channel, state, mask=inside)


@triton.jit
def _backward(
    a, h, initial, resets, grad_h, starts, grad_a, grad_b, grad_state, T, S, L, C,
    HAS_RESETS: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    inside = channel < S
    stream, chunk = (tl.program_id(1) // C).to(tl.int64), tl.program_id(1) % C
    carried = tl.load(starts + (stream * C + chunk) * S + channel, mask=inside, other=0.0)
    stop = min(chunk * L + L, T)
    for i in range(stop - chunk * L):
        t = stop - 1 - i
        at = (stream * T + t) * S + channel
        a_t = tl.load(a + at, mask=inside, other=0.0).to(carried.dtype)
        grad_t = tl.load(grad_h + at, mask=inside, other=0.0).to(carried.dtype)
        time = tl.full((STRIP,), t, tl.int32)  # a vector: Triton 3.9's interpreter takes no scalar in a mask
        previous = tl.load(h + at - S, mask=inside & (time > 0), other=0.0).to(carried.dtype)
        previous += tl.load(initial + stream * S + channel, mask=inside & (time == 0), other=0.0)
        total = grad_t + carried
        grad_decay = total * previous
        carried = a_t * total
        if HAS_RESETS:
            reset = tl.load(resets + stream * T + t) != 0
            grad_decay = tl.where(reset, 0.0, grad_decay)
            carried = tl.where(reset, 0.0, carried)
        tl.store(grad_b + at, total.to(grad_b.dtype.element_ty), mask=inside)
        tl.store(grad_a + at, grad_decay.to(grad_a.dtype.element_ty), mask=inside)
    if chunk == 0:
        tl.store(grad_state + stream * S + channel, carried, mask=inside)


def unsupported_reason(device_type: str, dtype: torch.dtype) -> str | None:
    """Why tensors of this kind cannot go through these kernels, or None."""
    if dtype.is_complex:
        return "its kernels are for real numbers; complex ones run with backend='torch'"
    if device_type != "cuda" and not (_INTERPRETED and device_type == "cpu"):
        return f"its kernels need tensors on a GPU, not on {device_type!r}"
    return None


def chunk_length(batch: int, steps: int, width: int) -> int:
    """Steps of a chunk: all of them where streams and channels fill the GPU by themselves."""
    programs = batch * triton.cdiv(width, _STRIP)
    wanted = triton.cdiv(_ENOUGH_PROGRAMS, programs)
    # At least the square root, or the pass over the chunks would be longer than the chunks themselves.
    length = max(triton.cdiv(steps, wanted), _SHORTEST_CHUNK, round(steps**0.5))
    return steps if 2 * length > steps else length


def _layout(shape: torch.Size, chunk: int | None) -> tuple[int, int, tuple[int, int]]:
    batch, steps, width = shape
    length = chunk_length(batch, steps, width) if chunk is None else min(chunk, steps)
    chunks = triton.cdiv(steps, length)
    return length, chunks, (triton.cdiv(width, _STRIP), batch * chunks)


def _ready(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().contiguous()


def _chunk_starts(
    summary: triton.JITFunction, inputs: tuple[Tensor, ...], first: Tensor, shape: torch.Size, layout, reverse: bool
) -> Tensor:
    """What enters each chunk (B,C,S); passes one and two."""
    (batch, steps, width), (length, chunks, grid) = shape, layout
    if chunks == 1:
        return first
    product, local, starts = (first.new_empty(batch, chunks, width) for _ in range(3))
    has_resets = inputs[2] is not inputs[0]
    summary[grid](*inputs, product, local, steps, width, length, chunks, HAS_RESETS=has_resets, STRIP=_STRIP)
    _combine[(grid[0], batch)](product, local, first, starts, width, chunks, REVERSE=reverse, STRIP=_STRIP)
    return starts


def scan_forward(
    a: Tensor, b: Tensor, state: Tensor, reset_mask: Tensor | None, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """a, b (B,T,S) of one type, state (B,S) float32 or float64 -> h (B,T,S), final state (B,S).

    `chunk` sets the steps of a chunk instead of `chunk_length`.
    """
    a, b, state = _ready(a), _ready(b), _ready(state)
    resets = a if reset_mask is None else reset_mask.contiguous().view(torch.uint8)
    layout = length, chunks, grid = _layout(a.shape, chunk)
    h, final = torch.empty_like(a), torch.empty_like(state)
    starts = _chunk_starts(_forward_summary, (a, b, resets), state, a.shape, layout, reverse=False)
    options = {"HAS_RESETS": reset_mask is not None, "STRIP": _STRIP}
    _forward[grid](a, b, resets, starts, h, final, a.shape[1], a.shape[2], length, chunks, **options)
    return h, final


def scan_backward(
    a: Tensor,
    h: Tensor,
    state: Tensor,
    reset_mask: Tensor | None,
    grad_h: Tensor | None,
    grad_final: Tensor | None,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a, b (B,T,S) and of the initial state (B,S)."""
    a, h, state = _ready(a), _ready(h), _ready(state)
    grad_h = torch.zeros_like(h) if grad_h is None else _ready(grad_h)
    grad_final = torch.zeros_like(state) if grad_final is None else _ready(grad_final)
    resets = a if reset_mask is None else reset_mask.contiguous().view(torch.uint8)
    layout = length, chunks, grid = _layout(a.shape, chunk)
    grad_a, grad_b, grad_state = torch.empty_like(a), torch.empty_like(h), torch.empty_like(state)
    starts = _chunk_starts(_backward_summary, (a, grad_h, resets), grad_final, a.shape, layout, reverse=True)
    _backward[grid](
        a, h, state, resets, grad_h, starts, grad_a, grad_b, grad_state, a.shape[1], a.shape[2], length, chunks,
        HAS_RESETS=reset_mask is not None, STRIP=_STRIP,
    )  # fmt: skip
    return grad_a, grad_b, grad_state
