"""The linear recurrence on a GPU: Triton kernels behind `linear_scan(backend="triton")`.

One program, a single warp, walks a strip of channels of one stream through time, with the state in registers (float32
or float64). It requests several rows before it uses the first: memory answers after hundreds of cycles, and only
concurrent requests use its bandwidth. Where streams and channels are too few to fill the GPU, time is cut into
chunks and three passes run: every chunk from zero, which leaves its last row and the product of its decays; a scan
over the chunks; and every chunk again from its true start. The backward pass is the same towards the past.

Set TRITON_INTERPRET=1 before the first import to run the kernels on a CPU, slowly, for tests.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .addresses import check_readable

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Channels of one program, one or two a thread of a warp, and bytes of one tensor that it requests before it computes:
# where programs are many, and where they are few.
_WIDE, _NARROW = (64, 2048), (32, 4096)
_MOST_ROWS = 32  # that the registers of a program hold
_ENOUGH_PROGRAMS = 1024  # several for each of the 100 to 150 multiprocessors of a large GPU
_SHORTEST_CHUNK = 128  # whose rows take about as long as the launches of two more kernels
_FEWEST_CHUNKS = 4  # two passes and the one between take longer than one where there are fewer


@triton.jit
def _place(S, chunks, STRIP: tl.constexpr):
    """The channels, the stream and the chunk of this program: neighbours read neighbouring memory."""
    strips = tl.cdiv(S, STRIP)
    row = tl.program_id(0) // strips
    return tl.program_id(0) % strips * STRIP + tl.arange(0, STRIP), (row // chunks).to(tl.int64), row % chunks


@triton.jit
def _read(tensor, at, step, rows, beyond, ROWS: tl.constexpr):
    """ROWS rows of a strip, `step` elements apart, requested at once; `beyond` replaces those from `rows` on, which is
    0 for channels outside."""
    read = ()
    for i in tl.static_range(ROWS):
        read += (tl.load(tensor + at + i * step, mask=i < rows, other=beyond),)
    return read


@triton.jit
def _combine(product, local, first, starts, S, chunks, REVERSE: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr):
    """The state before each chunk (B, chunks, S), from the one before the first (B,S)."""
    channel, stream, _ = _place(S, 1, STRIP)
    inside = channel < S
    state = tl.load(first + stream * S + channel, mask=inside, other=0.0)
    for done in range(0, chunks, ROWS):
        rows = tl.where(inside, chunks - done, 0)
        if REVERSE:
            at, step = (stream * chunks + chunks - 1 - done) * S + channel, -S
        else:
            at, step = (stream * chunks + done) * S + channel, S
        # The last chunk passes nothing on and has no summary.
        product_rows = _read(product, at, step, rows - 1, 1.0, ROWS)
        local_rows = _read(local, at, step, rows - 1, 0.0, ROWS)
        for i in tl.static_range(ROWS):
            tl.store(starts + at + i * step, state, mask=i < rows)
            # A product of zero (a reset) passes nothing on, not even a NaN; a state of zero stays one even where the
            # product of the decays overflowed.
            nothing = (product_rows[i] == 0.0) | (state == 0.0)
            state = local_rows[i] + tl.where(nothing, 0.0, product_rows[i] * state)


@triton.jit
def _forward(
    a, b, resets, starts, h, final, T, S, length, chunks,
    SUMMARY: tl.constexpr, HAS_RESETS: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each chunk from its start. A summary instead runs each but the last from zero, and writes only the product of
    its decays, to `h`, and its last row, to `final`, both (B, chunks, S)."""
    channel, stream, chunk = _place(S, chunks - 1 if SUMMARY else chunks, STRIP)
    inside = channel < S
    of_chunk = (stream * chunks + chunk) * S + channel
    decay = tl.full((STRIP,), 1.0, final.dtype.element_ty)
    if SUMMARY:
        state = tl.full((STRIP,), 0.0, final.dtype.element_ty)
    else:
        state = tl.load(starts + of_chunk, mask=inside, other=0.0)
    stop = min(chunk * length + length, T)
    for t in range(chunk * length, stop, ROWS):
        rows = tl.where(inside, stop - t, 0)
        at = (stream * T + t) * S + channel
        a_rows = _read(a, at, S, rows, 1.0, ROWS)
        b_rows = _read(b, at, S, rows, 0.0, ROWS)
        if HAS_RESETS:
            reset_rows = _read(resets, stream * T + t + tl.zeros_like(channel), 1, rows, 0, ROWS)
        for i in tl.static_range(ROWS):
            a_t = a_rows[i].to(state.dtype)
            if HAS_RESETS:
                state = tl.where(reset_rows[i] != 0, 0.0, state)
                decay = tl.where(reset_rows[i] != 0, 0.0, decay)
            state = a_t * state + b_rows[i].to(state.dtype)
            if SUMMARY:
                decay = a_t * decay
            else:
                tl.store(h + at + i * S, state.to(h.dtype.element_ty), mask=i < rows)
    if SUMMARY:
        tl.store(h + of_chunk, decay, mask=inside)
        tl.store(final + of_chunk, state, mask=inside)
    elif chunk == chunks - 1:
        tl.store(final + stream * S + channel, state, mask=inside)


@triton.jit
def _backward(
    a, h, initial, resets, grad_h, starts, grad_a, grad_b, grad_state, T, S, length, chunks,
    SUMMARY: tl.constexpr, HAS_RESETS: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same towards the past. A summary writes the product of the decays of each chunk but the first to `grad_a`,
    and the gradient that it passes to the state before it to `grad_state`."""
    channel, stream, chunk = _place(S, chunks - 1 if SUMMARY else chunks, STRIP)
    if SUMMARY:
        chunk += 1
    inside = channel < S
    of_chunk = (stream * chunks + chunk) * S + channel
    decay = tl.full((STRIP,), 1.0, grad_state.dtype.element_ty)
    if SUMMARY:
        carried = tl.full((STRIP,), 0.0, grad_state.dtype.element_ty)
    else:
        carried = tl.load(starts + of_chunk, mask=inside, other=0.0)
        before = tl.load(initial + stream * S + channel, mask=inside, other=0.0)
    steps = min(chunk * length + length, T) - chunk * length
    for done in range(0, steps, ROWS):
        t = chunk * length + steps - 1 - done
        rows = tl.where(inside, steps - done, 0)
        at = (stream * T + t) * S + channel
        a_rows = _read(a, at, -S, rows, 1.0, ROWS)
        grad_rows = _read(grad_h, at, -S, rows, 0.0, ROWS)
        if not SUMMARY:
            h_rows = _read(h, at - S, -S, tl.minimum(rows, t), 0.0, ROWS)
        if HAS_RESETS:
            reset_rows = _read(resets, stream * T + t + tl.zeros_like(channel), -1, rows, 0, ROWS)
        for i in tl.static_range(ROWS):
            a_t = a_rows[i].to(carried.dtype)
            total = grad_rows[i].to(carried.dtype) + carried
            carried = a_t * total
            if SUMMARY:
                decay = a_t * decay
            else:
                previous = tl.where(t == i, before, h_rows[i].to(carried.dtype))
                grad_decay = total * previous
                if HAS_RESETS:
                    grad_decay = tl.where(reset_rows[i] != 0, 0.0, grad_decay)
                tl.store(grad_b + at - i * S, total.to(grad_b.dtype.element_ty), mask=i < rows)
                tl.store(grad_a + at - i * S, grad_decay.to(grad_a.dtype.element_ty), mask=i < rows)
            if HAS_RESETS:
                carried = tl.where(reset_rows[i] != 0, 0.0, carried)
                decay = tl.where(reset_rows[i] != 0, 0.0, decay)
    if SUMMARY:
        tl.store(grad_a + of_chunk, decay, mask=inside)
        tl.store(grad_state + of_chunk, carried, mask=inside)
    elif chunk == 0:
        tl.store(grad_state + stream * S + channel, carried, mask=inside)


def unsupported_reason(device_type: str, dtype: torch.dtype) -> str | None:
    """Why tensors of this kind cannot go through these kernels, or None."""
    if dtype.is_complex:
        return "its kernels are for real numbers; complex ones run with backend='torch'"
    if device_type != "cuda" and not (_INTERPRETED and device_type == "cpu"):
        return f"its kernels need tensors on a GPU, not on {device_type!r}"
    return None


def _strip_and_bytes(batch: int, width: int) -> tuple[int, int]:
    """Channels of a program, and bytes of one tensor that it requests at once."""
    return _WIDE if batch * triton.cdiv(width, _WIDE[0]) >= _ENOUGH_PROGRAMS else _NARROW


def chunk_length(batch: int, steps: int, width: int) -> int:
    """Steps of a chunk: all of them where streams and channels fill the GPU by themselves."""
    strip, _ = _strip_and_bytes(batch, width)
    wanted = triton.cdiv(_ENOUGH_PROGRAMS, batch * triton.cdiv(width, strip))
    # At least the square root, or the pass over the chunks would be longer than the chunks themselves.
    length = max(triton.cdiv(steps, wanted), _SHORTEST_CHUNK, round(steps**0.5))
    return length if steps >= _FEWEST_CHUNKS * length else steps


def _ready(name: str, tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor with values of its own, contiguous, of that type and on the device of `like`."""
    tensor = tensor.resolve_neg().contiguous()
    check_readable(name, tensor, dtype, tensor.numel(), like.device)
    return tensor


def _device_of(tensor: Tensor):
    """Kernels start on the current GPU, which may be another one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


class _Launch:
    """How the kernels run on tensors of one kind: chunks, grid and compile-time constants."""

    def __init__(self, like: Tensor, reset_mask: Tensor | None, chunk: int | None):
        self.batch, self.steps, self.width = like.shape
        self.length = chunk_length(*like.shape) if chunk is None else min(chunk, self.steps)
        self.chunks = triton.cdiv(self.steps, self.length)
        self.strip, self.bytes = _strip_and_bytes(self.batch, self.width)
        self.strips = triton.cdiv(self.width, self.strip)
        self.sizes = self.steps, self.width, self.length, self.chunks
        self.resets = like
        if reset_mask is not None:
            self.resets = _ready("reset_mask", reset_mask, like, torch.bool).view(torch.uint8)
        self.options = {"HAS_RESETS": reset_mask is not None, **self._constants(like.dtype)}

    def _constants(self, dtype: torch.dtype) -> dict[str, int]:
        rows = min(self.bytes // (self.strip * dtype.itemsize), _MOST_ROWS)
        return {"STRIP": self.strip, "ROWS": rows, "num_warps": 1}

    def programs(self, chunks: int) -> tuple[int]:
        """The grid for that many chunks of every strip of every stream."""
        return (self.batch * chunks * self.strips,)

    def chunk_starts(self, summarize: Callable[[Tensor, Tensor], None], first: Tensor, reverse: bool) -> Tensor:
        """The state before each chunk (B, chunks, S), from the one before the first (B,S): passes one and two."""
        if self.chunks == 1:
            return first
        product, local, starts = (first.new_empty(self.batch, self.chunks, self.width) for _ in range(3))
        summarize(product, local)
        constants = self._constants(first.dtype)
        _combine[self.programs(1)](
            product, local, first, starts, self.width, self.chunks, REVERSE=reverse, **constants
        )
        return starts


def scan_forward(
    a: Tensor, b: Tensor, state: Tensor, reset_mask: Tensor | None, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """a, b (B,T,S) of one type, state (B,S) float32 or float64 -> h (B,T,S), final state (B,S).

    `chunk` sets the steps of a chunk instead of `chunk_length`.
    """
    a, b = _ready("a", a, a, a.dtype), _ready("b", b, a, a.dtype)
    state = _ready("initial_state", state, a, state.dtype)
    launch = _Launch(a, reset_mask, chunk)
    h, final = torch.empty_like(a), torch.empty_like(state)
    with _device_of(a):

        def run(starts: Tensor, h: Tensor, final: Tensor, is_summary: bool) -> None:
            grid = launch.programs(launch.chunks - is_summary)
            _forward[grid](a, b, launch.resets, starts, h, final, *launch.sizes, SUMMARY=is_summary, **launch.options)

        starts = launch.chunk_starts(lambda product, local: run(state, product, local, True), state, reverse=False)
        run(starts, h, final, False)
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
    a, h = _ready("a", a, a, a.dtype), _ready("h", h, a, h.dtype)
    state = _ready("initial_state", state, a, state.dtype)
    grad_h = torch.zeros_like(h) if grad_h is None else _ready("grad_h", grad_h, a, grad_h.dtype)
    grad_final = torch.zeros_like(state) if grad_final is None else _ready("grad_final", grad_final, a, state.dtype)
    launch = _Launch(a, reset_mask, chunk)
    outputs = torch.empty_like(a), torch.empty_like(h), torch.empty_like(state)
    with _device_of(a):

        def run(starts: Tensor, grads: tuple[Tensor, Tensor, Tensor], is_summary: bool) -> None:
            grid = launch.programs(launch.chunks - is_summary)
            _backward[grid](
                a, h, state, launch.resets, grad_h, starts, *grads, *launch.sizes, SUMMARY=is_summary, **launch.options
            )

        starts = launch.chunk_starts(
            lambda product, local: run(grad_final, (product, product, local), True), grad_final, reverse=True
        )
        run(starts, outputs, False)
    return outputs
