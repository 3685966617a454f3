"""The linear recurrence on a CPU: the compiled kernel behind `linear_scan(backend="cpu")`.

`linear_scan_cpu.c` is plain C, loaded with ctypes, which releases the interpreter's lock while it computes. This
module checks and prepares the tensors. Importing it raises ImportError where the kernel was not built, or was built
from another version of its source.
"""

import ctypes
import platform
import struct

import torch
from torch import Tensor

from .addresses import address
from .compiled import load_library
from .output_memory import RESULTS
from .thread_count import free_threads
from .thread_pool import use_pool

_VERSION = 3  # of the struct in linear_scan_cpu.c
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
_TYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_TYPES)}
# From this number of steps on, sums of these types are kept in float64: a state that decays slowly keeps every
# rounding, and memory is slower than the wider arithmetic.
_WIDE_STEPS = 1024
_WIDE_STATES = {torch.float32: (6, torch.float64), torch.complex64: (7, torch.complex128)}

# Fewer elements than this are done before another thread wakes up.
_SERIAL_ELEMENTS = 1 << 15
# From here on T = 1 is faster than torch's own operations, whose calls cost less, and whose threads wait awake. Resets
# are further operations there.
_SINGLE_STEP_ELEMENTS = 1 << 17
_SINGLE_STEP_ELEMENTS_OF_THREADS = 1 << 19
# Outputs of this many bytes bypass the cache: they would be evicted before their next use, and their lines need not be
# read before they are written.
_BYPASS_BYTES = 1 << 23


def _load() -> ctypes.CDLL:
    library = load_library("_linear_scan_cpu", "hf_scan_version", _VERSION)
    library.hf_scan_forward.argtypes = library.hf_scan_backward.argtypes = (ctypes.c_char_p,)
    library.hf_scan_forward.restype = library.hf_scan_backward.restype = None
    library.hf_scan_instruction_level.argtypes = (ctypes.c_int,)
    use_pool(library, "scan")
    return library


_library = _load()
_pack = struct.Struct("=19q").pack


def unsupported_reason(device_type: str, dtype: torch.dtype) -> str | None:
    """Why tensors of this kind cannot go through this kernel, or None."""
    if device_type != "cpu":
        return f"its kernel needs tensors on the CPU, not on {device_type!r}"
    if dtype not in _TYPE_NUMBERS:
        return f"its kernel has no version for {dtype}"
    return None


def takes_single_steps(elements: int, has_resets: bool) -> bool:
    """True where T = 1 with `elements` elements is faster here than by autograd's own formulas."""
    threads_help_torch = torch.get_num_threads() > 1 and not has_resets
    return elements >= (_SINGLE_STEP_ELEMENTS_OF_THREADS if threads_help_torch else _SINGLE_STEP_ELEMENTS)


def instruction_level(limit: int = -1) -> int:
    """The instruction set in use: 0 is the baseline of the architecture; on x86-64 1 is AVX2 and 2 AVX-512.

    A `limit` of 0 or more sets it, for the whole process, to at most that.
    """
    return _library.hf_scan_instruction_level(limit)


def instruction_set() -> str:
    """The name of `instruction_level()`."""
    machine = platform.machine()
    return ("SSE2", "AVX2", "AVX-512")[instruction_level()] if machine in ("x86_64", "AMD64") else machine


def _plain(tensor: Tensor) -> Tensor:
    """Without lazy conjugation or negation."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _rows(tensor: Tensor) -> tuple[Tensor, int, int]:
    """A tensor (B,T,S) whose channels are neighbours, with the strides of B and T; a copy only if needed."""
    tensor = _plain(tensor)
    stream, step, channel = tensor.stride()
    if channel != 1:
        tensor = tensor.contiguous()
        stream, step, channel = tensor.stride()
    return tensor, stream, step


def _whole(tensor: Tensor) -> Tensor:
    return _plain(tensor).contiguous()


def _call_options(shape: torch.Size, dtype: torch.dtype, state_dtype: torch.dtype) -> tuple[torch.dtype, tuple]:
    """The type of the kernel's state, and the type's number, the threads, and 1 where results bypass the cache."""
    number = _TYPE_NUMBERS[dtype]
    if shape[1] >= _WIDE_STEPS:
        number, state_dtype = _WIDE_STATES.get(dtype, (number, state_dtype))
    elements = shape.numel()
    threads = free_threads() if elements >= _SERIAL_ELEMENTS else 1
    bypass = elements * dtype.itemsize >= _BYPASS_BYTES
    return state_dtype, (number, threads, bypass)


def _resets(reset_mask: Tensor | None) -> tuple[Tensor | None, int]:
    """A contiguous mask, which the caller must keep alive, and its address."""
    if reset_mask is None:
        return None, 0
    reset_mask = reset_mask.contiguous()
    return reset_mask, address("reset_mask", reset_mask, torch.bool, reset_mask.numel())


def scan_forward(a: Tensor, b: Tensor, state: Tensor, reset_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """a, b (B,T,S) of one type, state (B,S) of that type or float32, whichever is wider -> h (B,T,S), final (B,S)."""
    a, a_stream, a_step = _rows(a)
    b, b_stream, b_step = _rows(b)
    kept_dtype, options = _call_options(a.shape, a.dtype, state.dtype)
    initial = _whole(state).to(kept_dtype)
    reset_mask, resets = _resets(reset_mask)
    h, final = RESULTS.empty(a.shape, a.dtype), torch.empty_like(initial)
    sequence, single = (a.dtype, h.numel()), (kept_dtype, initial.numel())  # type and size
    _library.hf_scan_forward(
        _pack(
            *options, *a.shape,
            address("a", a, *sequence, strided=True), a_stream, a_step,
            address("b", b, *sequence, strided=True), b_stream, b_step,
            address("initial_state", initial, *single), resets,
            address("h", h, *sequence), address("final_state", final, *single), 0, 0, 0,
        )
    )  # fmt: skip
    return h, final.to(state.dtype)


def scan_backward(
    a: Tensor, h: Tensor, state: Tensor, reset_mask: Tensor | None, grad_h: Tensor | None, grad_final: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a, b (B,T,S) and of the initial state (B,S)."""
    if grad_h is None:
        grad_h = h.new_zeros(h.shape[2]).expand(h.shape)
    a, a_stream, a_step = _rows(a)
    grad_h, grad_stream, grad_step = _rows(grad_h)
    kept_dtype, options = _call_options(h.shape, h.dtype, state.dtype)
    h, initial = _whole(h), _whole(state).to(kept_dtype)
    grad_final = None if grad_final is None else _whole(grad_final).to(kept_dtype)
    reset_mask, resets = _resets(reset_mask)
    grad_a, grad_b = RESULTS.empty(h.shape, h.dtype), RESULTS.empty(h.shape, h.dtype)
    grad_state = torch.empty_like(initial)
    sequence, single = (h.dtype, h.numel()), (kept_dtype, initial.numel())  # type and size
    _library.hf_scan_backward(
        _pack(
            *options, *h.shape,
            address("a", a, *sequence, strided=True), a_stream, a_step,
            address("grad_h", grad_h, *sequence, strided=True), grad_stream, grad_step,
            address("initial_state", initial, *single), resets, address("h", h, *sequence),
            0 if grad_final is None else address("grad_final", grad_final, *single),
            address("grad_a", grad_a, *sequence), address("grad_b", grad_b, *sequence),
            address("grad_state", grad_state, *single),
        )
    )  # fmt: skip
    return grad_a, grad_b, grad_state.to(state.dtype)
