"""Matrix products and the parts of a layer between them on a CPU, forward and backward: compiled kernels.

`training_cpu.c` is plain C, loaded with ctypes, which releases the interpreter's lock while it computes. This module
checks and prepares the tensors. Importing it raises ImportError where the kernel was not built, or was built from
another version of its source.

All tensors of a call are of one type, float32 or float64, on the CPU. Results have the same bits for any number of
threads; they differ by rounding between instruction sets, and from torch.

Shape letters: B streams, T steps, S state width. `width` is the last dimension, and `rows` are all others together.
"""

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from .addresses import address, addresses
from .compiled import load_library
from .output_memory import RESULTS
from .thread_count import free_threads
from .thread_pool import use_pool

_VERSION = 1  # of the structs in training_cpu.c
_CHUNK = 64  # rows whose gradients of a vector are added up in order, as in training_cpu.c
_PANEL = 32  # columns of a panel of packed numbers, or more
_SERIAL_ELEMENTS = 1 << 13  # below this, a second thread costs more than it takes over
_SERIAL_PRODUCTS = 1 << 19

_library = load_library("_training_cpu", "hf_training_version", _VERSION)
_library.hf_training_instruction_level.argtypes = (ctypes.c_int,)
use_pool(_library, "training")
_PASSES = ("gated_norm", "gated_gelu", "gate_coefficients", "rms_norm")
_TABLE_PASSES = ("table_sum", "table_gradient", "table_adagrad")
_TYPES = {torch.float32: "float32", torch.float64: "float64"}


def _function(name: str):
    function = getattr(_library, f"hf_{name}")
    function.argtypes, function.restype = (ctypes.c_char_p,), None
    return function


_functions = {
    (name, dtype): _function(f"{name}_{suffix}")
    for dtype, suffix in _TYPES.items()
    for name in ("products", *_PASSES, *(f"{name}_backward" for name in _PASSES), *_TABLE_PASSES)
}


def supports(dtype: torch.dtype) -> bool:
    """True for the types that the kernels compute in."""
    return dtype in _TYPES


def instruction_level(limit: int = -1) -> int:
    """As `linear_scan_cpu.instruction_level`, of these kernels."""
    return _library.hf_training_instruction_level(limit)


# ---- Matrix products ----


def has_fast_products() -> bool:
    """True with AVX2 or AVX-512, where they are faster than torch's; with less they are slower, or not measured."""
    return instruction_level() > 0


def multiply(products: Sequence[tuple[Tensor, Tensor, Tensor, bool]]) -> None:
    """Compute `to = a @ b`, or `to += a @ b`, for each (a, b, to, add), side by side.

    Products of the same `to`, one right after the other, are added up in this order; otherwise no product may read or
    write the result of another.

    Args:
        products: matrices, of which `to` has columns that are neighbours in memory.
    """
    dtype, threads = products[0][0].dtype, 1
    if sum(a.numel() * b.shape[1] for a, b, _, _ in products) >= _SERIAL_PRODUCTS:
        threads = free_threads()
    packed, fields, before = {}, [threads, len(products)], None
    for a, b, to, add in products:
        (rows, depth), width = a.shape, b.shape[1]
        a = a if 1 in a.stride() else a.contiguous()
        is_transposed = a.stride(1) != 1
        found = b.data_ptr(), b.stride(), b.shape
        if is_new := not is_transposed and found not in packed:
            packed[found] = RESULTS.empty(torch.Size((-(-width // _PANEL) * _PANEL * depth,)), dtype)
        fields += (
            rows, depth, width,
            address("a", a, dtype, rows * depth, strided=True), *a.stride(),
            address("b", b, dtype, depth * width, strided=True), *b.stride(),
            address("to", to, dtype, rows * width, strided=True), to.stride(0), add,
            0 if is_transposed else packed[found].data_ptr(), is_new, add and to.data_ptr() == before,
        )  # fmt: skip
        before = to.data_ptr()
    _functions["products", dtype](struct.pack(f"={len(fields)}q", *fields))


# ---- Element-wise passes ----


def _run(name: str, like: Tensor, eps: float | None, tensors: dict[str, Tensor], sizes: Sequence[int]) -> None:
    """Run a pass over `like`'s rows; `tensors` in the order of its struct, which ends with zeros."""
    width, elements = like.shape[-1], like.numel()
    pointers = addresses(tensors, zip(tensors, sizes, strict=True), like.dtype)
    threads = free_threads() if elements >= _SERIAL_ELEMENTS else 1
    head = struct.pack("=3q", threads, elements // width, width) + (b"" if eps is None else struct.pack("=d", eps))
    _functions[name, like.dtype](head + struct.pack(f"={len(pointers)}q", *pointers))


def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor in memory that is used again."""
    return RESULTS.empty(shape, dtype)


def _like(tensor: Tensor) -> Tensor:
    return empty(tensor.shape, tensor.dtype)


def gated_norm(gate: Tensor, value: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """LN( GeLU(LN(gate)) ∘ LN(value) ), (…, width), and the moments (rows, 6) for the backward pass."""
    gate, value, to = gate.contiguous(), value.contiguous(), _like(gate)
    n = gate.numel()
    moments = gate.new_empty(n // gate.shape[-1], 6)
    tensors = {"gate": gate, "value": value, "to": to, "moments": moments}
    _run("gated_norm", gate, eps, tensors, (n, n, n, moments.numel()))
    return to, moments


def gated_norm_backward(
    gate: Tensor, value: Tensor, moments: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `value`."""
    return _gated_backward("gated_norm_backward", gate, value, moments, grad, eps)


def gated_gelu(gate: Tensor, value: Tensor) -> Tensor:
    """GeLU(gate) ∘ value, (…, width)."""
    gate, value, to = gate.contiguous(), value.contiguous(), _like(gate)
    _run("gated_gelu", gate, 0.0, {"gate": gate, "value": value, "to": to}, (gate.numel(),) * 3)
    return to


def gated_gelu_backward(gate: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `value`."""
    return _gated_backward("gated_gelu_backward", gate, value, grad.new_empty(0, 6), grad, 0.0)


def _gated_backward(name: str, gate: Tensor, value: Tensor, moments: Tensor, grad: Tensor, eps: float):
    gate, value, grad = gate.contiguous(), value.contiguous(), grad.contiguous()
    n, grads = gate.numel(), (_like(gate), _like(value))
    tensors = {"gate": gate, "value": value, "to": grads[0], "moments": moments, "grad": grad}
    tensors |= {"grad_gate": grads[0], "grad_value": grads[1]}
    _run(name, gate, eps, tensors, (n, n, n, moments.numel(), n, n, n))
    return grads


def gate_coefficients(
    recurrence_gate: Tensor, rate: Tensor, input_gate: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """r = exp(-rate ∘ σ(recurrence_gate)) and sqrt(1 - r²) ∘ input_gate ∘ inputs, (…, S) with rates (S,)."""
    given = [tensor.contiguous() for tensor in (recurrence_gate, rate, input_gate, inputs)]
    n, results = recurrence_gate.numel(), (_like(recurrence_gate), _like(recurrence_gate))
    names = ("recurrence_gate", "rate", "input_gate", "inputs", "decay", "scaled")
    tensors = dict(zip(names, (*given, *results), strict=True))
    _run("gate_coefficients", recurrence_gate, None, tensors, (n, rate.numel(), n, n, n, n))
    return results


def gate_coefficients_backward(
    recurrence_gate: Tensor, rate: Tensor, input_gate: Tensor, inputs: Tensor, grad_decay: Tensor, grad_scaled: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the four arguments of [`gate_coefficients`]."""
    given = (recurrence_gate, rate, input_gate, inputs, grad_decay, grad_scaled)
    recurrence_gate, rate, input_gate, inputs, grad_decay, grad_scaled = (tensor.contiguous() for tensor in given)
    n, width = recurrence_gate.numel(), rate.numel()
    grads = [_like(recurrence_gate) for _ in range(3)]
    sums = rate.new_empty(_chunks(n // width), width)
    names = ("recurrence_gate", "rate", "input_gate", "inputs", "decay", "scaled", "grad_decay", "grad_scaled")
    names += ("grad_recurrence_gate", "grad_input_gate", "grad_inputs", "grad_rate")
    values = (recurrence_gate, rate, input_gate, inputs, *grads[:2], grad_decay, grad_scaled, *grads, sums)
    sizes = (n, width, *[n] * 9, sums.numel())
    _run("gate_coefficients_backward", recurrence_gate, None, dict(zip(names, values, strict=True)), sizes)
    return grads[0], sums.sum(0), *grads[1:]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """weight ∘ x / sqrt(mean(x²) + eps), (…, width), and the scales (rows,) for the backward pass."""
    x, to = x.contiguous(), _like(x)
    scales = x.new_empty(x.numel() // x.shape[-1])
    _norm("rms_norm", x, weight, eps, {"to": to, "scales": scales})
    return to, scales


def rms_norm_backward(
    x: Tensor, weight: Tensor | None, scales: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `x` and `weight`."""
    x, grad_x = x.contiguous(), _like(x)
    sums = x.new_empty(0 if weight is None else _chunks(len(scales)), x.shape[-1])
    tensors = {"to": grad_x, "scales": scales, "grad": grad.contiguous(), "grad_weight": sums}
    _norm("rms_norm_backward", x, weight, eps, tensors)
    return grad_x, None if weight is None else sums.sum(0)


def _norm(name: str, x: Tensor, weight: Tensor | None, eps: float, tensors: dict[str, Tensor]) -> None:
    weight = x.new_empty(0) if weight is None else weight.contiguous()
    tensors = {"x": x, "weight": weight, **tensors}
    _run(name, x, eps, tensors, [tensor.numel() for tensor in tensors.values()])


def _chunks(rows: int) -> int:
    return -(-rows // _CHUNK)


# ---- Tables of which a step reads few rows ----


def table_sum(table: Tensor, lookups: Tensor) -> Tensor:
    """The sums (…, width) of the rows `lookups` (…, n) of a table (rows, width)."""
    width, (*outer, group) = table.shape[1], lookups.shape
    result = RESULTS.empty(torch.Size((*outer, width)), table.dtype)
    sizes = {"values": result.numel(), "lookups": lookups.numel()}
    _run_table("table_sum", table, lookups.numel() // group, group, sizes, lookups=lookups.contiguous(), values=result)
    return result


def table_gradient(table: Tensor, lookups: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the rows that [`table_sum`] read, ascending, and their gradients (n, width)."""
    width, group = table.shape[1], lookups.shape[-1]
    ordered, order = lookups.flatten().sort(stable=True)
    n = len(ordered)
    ranks = torch.zeros_like(ordered)
    torch.cumsum(ordered[1:] != ordered[:-1], 0, out=ranks[1:])
    count = int(ranks[-1]) + 1 if n else 0
    found, values = ordered.new_empty(count), empty(torch.Size((count, width)), table.dtype)
    sizes = {"lookups": n, "order": n, "ranks": n, "values": count * width, "grad": n // group * width, "found": count}
    tensors = {"lookups": ordered, "order": order, "ranks": ranks, "values": values, "grad": grad.contiguous()}
    _run_table("table_gradient", table, n, group, sizes, found=found, **tensors)
    return found, values


def table_adagrad(table: Tensor, sums: Tensor, rows: Tensor, grad: Tensor, rate: float, eps: float) -> None:
    """One step of row-wise Adagrad for rows that differ; `sums`, one for each row of the table, and `table` change."""
    sizes = {"lookups": len(rows), "grad": rows.numel() * table.shape[1], "sums": len(table)}
    tensors = {"lookups": rows.contiguous(), "grad": grad.contiguous(), "sums": sums}
    _run_table("table_adagrad", table, len(rows), 1, sizes, rate, eps, **tensors)


_TABLE_TENSORS = ("lookups", "order", "ranks", "values", "grad", "found", "sums")
_INTEGERS = {"lookups", "order", "ranks", "found"}


def _run_table(
    name: str, table: Tensor, rows: int, group: int, sizes: dict[str, int], rate=0.0, eps=0.0, **tensors: Tensor
) -> None:
    """Run a pass over `rows` outputs, lookups or rows of a table."""
    pointers = [address("table", table, table.dtype, table.numel())]
    for each in _TABLE_TENSORS:
        dtype = torch.long if each in _INTEGERS else table.dtype
        pointers.append(address(each, tensors[each], dtype, sizes[each]) if each in tensors else 0)
    _check_lookups(tensors["lookups"], len(table))
    threads = free_threads() if rows * table.shape[1] >= _SERIAL_ELEMENTS else 1
    head = (threads, rows, table.shape[1], group, rate, eps)
    _functions[name, table.dtype](struct.pack("=4q2d8q", *head, *pointers))


def _check_lookups(lookups: Tensor, rows: int) -> None:
    if lookups.numel():
        least, most = torch.aminmax(lookups)
        if least < 0 or most >= rows:
            raise IndexError(f"`lookups` has rows {int(least)} to {int(most)}; the table has {rows} rows.")
