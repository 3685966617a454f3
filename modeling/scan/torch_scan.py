"""The linear scan in plain torch: what `linear_scan(backend="torch")` runs, with a hand-written backward pass.

Shape letters: B streams or batch, T steps, S state width.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch
from torch import Tensor

# A block of this many elements of five float32 tensors is still in the outer cache when it is read again.
_CPU_BLOCK_ELEMENTS = 1 << 18
# On an accelerator a block saves launches, not cache misses.
_ACCELERATOR_BLOCK_ELEMENTS = 1 << 26
# Steps of at least this many elements cost more than the call that handles them: chunks would only add work.
_WIDE_ROW = 4096


def _reset_rows(reset_mask: Tensor | None, dim: int, reverse: bool) -> Iterable[Tensor | None]:
    """For every step in the order of the scan, the mask that broadcasts over a row, or None: nothing to reset."""
    if reset_mask is None:
        return repeat(None)
    rows = list(reset_mask.unsqueeze(-1).unbind(dim))
    if reset_mask.device.type == "cpu":
        others = [other for other in range(reset_mask.dim()) if other != dim]
        needed = reset_mask.any(dim=others).tolist()
        rows = [row if need else None for row, need in zip(rows, needed, strict=True)]
    return rows[::-1] if reverse else rows


def _rows(tensor: Tensor, dim: int, reverse: bool) -> Sequence[Tensor]:
    rows = tensor.unbind(dim)
    return rows[::-1] if reverse else rows


def _scan_serial(
    out: Tensor, a: Tensor, b: Tensor, state: Tensor, reset_mask: Tensor | None, *, reverse: bool, dim: int = 1
) -> Tensor:
    """out_t = a_t * out_{t-1} + b_t along `dim` (towards smaller t if `reverse`); returns the last row, a view."""
    rows = (_rows(tensor, dim, reverse) for tensor in (out, a, b))
    for out_t, a_t, b_t, reset_t in zip(*rows, _reset_rows(reset_mask, dim, reverse), strict=False):
        if reset_t is not None:
            state = state.masked_fill(reset_t, 0)
        torch.addcmul(b_t, a_t, state, out=out_t)
        state = out_t
    return state


def _scan_chunked(
    out: Tensor, a: Tensor, b: Tensor, state: Tensor, reset_mask: Tensor | None, *, reverse: bool, chunk: int
) -> Tensor:
    """The same with T a multiple of `chunk`: all chunks advance side by side, first from zero, then for good.

    The first pass leaves each chunk's last row and the product of its decays; a scan over the chunks turns these into
    the state at each chunk's start; the second pass runs the recurrence from there, so that errors do not grow.
    """
    shape = (-1, chunk)
    a_chunks, b_chunks, out_chunks = (tensor.unflatten(1, shape) for tensor in (a, b, out))
    resets = None if reset_mask is None else reset_mask.unflatten(1, shape)
    chunk_resets = None if resets is None else resets.any(dim=2)
    product = _product(a_chunks)
    if not product.isfinite().all():  # an overflowed product times a state of zero is NaN: go step by step
        return _scan_serial(out, a, b, state, reset_mask, reverse=reverse)
    local = torch.zeros_like(product)
    rows = (_rows(tensor, 2, reverse) for tensor in (a_chunks, b_chunks))
    for a_t, b_t, reset_t in zip(*rows, _reset_rows(resets, 2, reverse), strict=False):
        if reset_t is not None:
            local.masked_fill_(reset_t, 0)
        torch.addcmul(b_t, a_t, local, out=local)
    ends = torch.empty_like(local)
    _scan_serial(ends, product, local, state, chunk_resets, reverse=reverse)
    first = state.unsqueeze(1)
    starts = torch.cat((ends[:, 1:], first) if reverse else (first, ends[:, :-1]), dim=1)
    _scan_serial(out_chunks, a_chunks, b_chunks, starts, resets, reverse=reverse, dim=2)
    return out[:, 0] if reverse else out[:, -1]


def _product(a: Tensor) -> Tensor:
    """(B, chunks, T, S) -> (B, chunks, S), rounded once where the device has wider types: many factors just below 1
    are otherwise rounded down more often than up."""
    if a.device.type not in ("cpu", "cuda"):
        return a.prod(2)
    return a.prod(2, dtype=torch.promote_types(a.dtype, torch.float64)).to(a.dtype)


def _scan_block(
    out: Tensor, a: Tensor, b: Tensor, state: Tensor, reset_mask: Tensor | None, *, reverse: bool
) -> Tensor:
    """The same: in chunks where steps are many and narrow, the rest step by step."""
    batch, steps, width = out.shape
    chunk = round(steps**0.5)  # two passes of `chunk` wide operations, then one over the chunks with narrow ones
    if batch * width >= _WIDE_ROW or steps < 32:
        return _scan_serial(out, a, b, state, reset_mask, reverse=reverse)
    whole = steps - steps % chunk
    segments = [(steps - whole, steps), (0, steps - whole)] if reverse else [(0, whole), (whole, steps)]
    for (start, stop), scan in zip(segments, (_scan_chunked, _scan_serial), strict=True):
        if start == stop:
            continue
        options = {"chunk": chunk} if scan is _scan_chunked else {}
        parts = (tensor[:, start:stop] for tensor in (out, a, b))
        resets = None if reset_mask is None else reset_mask[:, start:stop]
        state = scan(*parts, state, resets, reverse=reverse, **options)
    return state


def _block_starts(like: Tensor, steps: int) -> range:
    """Starts of the blocks that cover `steps` steps of a (B,·,S) tensor; the range's step is their length."""
    elements = _CPU_BLOCK_ELEMENTS if like.device.type == "cpu" else _ACCELERATOR_BLOCK_ELEMENTS
    return range(0, steps, max(1, elements // (like.shape[0] * like.shape[2])))


def _values(tensor: Tensor, dtype: torch.dtype, *, conjugate: bool = False) -> Tensor:
    """The tensor in that type, conjugated if asked, without lazy conjugation or negation.

    Inside a compiled graph an operator runs where torch no longer applies the lazy forms, so `x.conj() * y` would
    silently leave out the conjugation there.
    """
    tensor = tensor.to(dtype).resolve_conj().resolve_neg()
    return tensor.conj_physical() if conjugate else tensor


def torch_scan_forward(a: Tensor, b: Tensor, state: Tensor, reset_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """a, b (B,T,S) of one type, state (B,S) of the wider type -> h (B,T,S), final state (B,S)."""
    h = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    same_type = h.dtype == state.dtype
    state = _values(state, state.dtype)
    starts = _block_starts(a, a.shape[1])
    for start in starts:
        block = slice(start, min(start + starts.step, a.shape[1]))
        out = h[:, block] if same_type else torch.empty_like(h[:, block], dtype=state.dtype)
        a_block, b_block = (_values(tensor[:, block], state.dtype) for tensor in (a, b))
        resets = None if reset_mask is None else reset_mask[:, block]
        state = _scan_block(out, a_block, b_block, state, resets, reverse=False)
        if not same_type:
            h[:, block] = out
    return h, state.clone(memory_format=torch.contiguous_format)


def torch_scan_backward(
    a: Tensor, h: Tensor, state: Tensor, reset_mask: Tensor | None, grad_h: Tensor | None, grad_final: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a, b (B,T,S) and of the initial state (B,S).

    With g_t the whole gradient of h_t: g_t = grad_h_t + conj(a_{t+1}) * g_{t+1}, a scan towards the past; then
    db_t = g_t and da_t = g_t * conj(h_{t-1}), where a reset before t cuts both links between t - 1 and t.
    """
    steps, wide = a.shape[1], state.dtype
    grad_a, grad_b = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, h))
    if grad_h is None:
        grad_h = state.new_zeros(()).expand(a.shape)
    g = _values(grad_h[:, -1], wide)
    if grad_final is not None:
        g = g + _values(grad_final, wide)
    grad_b[:, -1] = g
    grad_a[:, -1] = g * _values(h[:, -2] if steps > 1 else state, wide, conjugate=True)
    starts = _block_starts(a, steps - 1)
    for start in reversed(starts):
        stop = min(start + starts.step, steps - 1)
        block, following = slice(start, stop), slice(start + 1, stop + 1)
        out = grad_b[:, block] if grad_b.dtype == wide else torch.empty_like(grad_b[:, block], dtype=wide)
        a_block = _values(a[:, following], wide, conjugate=True)
        resets = None if reset_mask is None else reset_mask[:, following]
        g = _scan_block(out, a_block, _values(grad_h[:, block], wide), g, resets, reverse=True)
        if out.dtype != grad_b.dtype:
            grad_b[:, block] = out
        # While the block is still in the cache; its first step may have the initial state as predecessor.
        inner = slice(max(start, 1), stop)
        previous = _values(h[:, inner.start - 1 : stop - 1], wide, conjugate=True)
        if out.dtype == grad_a.dtype:
            torch.mul(out[:, inner.start - start :], previous, out=grad_a[:, inner])
        else:
            grad_a[:, inner] = out[:, inner.start - start :] * previous
    if steps > 1:
        grad_a[:, 0] = g * _values(state, wide, conjugate=True)
    grad_state = g * _values(a[:, 0], wide, conjugate=True)
    if reset_mask is not None:
        grad_a[reset_mask] = 0
        grad_state.masked_fill_(reset_mask[:, :1], 0)
    return grad_a, grad_b, grad_state
