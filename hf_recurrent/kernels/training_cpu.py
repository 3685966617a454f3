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

from .addresses import address, check_lookups
from .compiled import load_library
from .output_memory import RESULTS, is_simulated
from .thread_count import free_threads
from .thread_pool import use_pool

_VERSION = 8  # of the structs in training_cpu.c
_FIELDS = 17  # of a product
_CHUNK = 64  # rows whose gradients of a vector are added up in order, as in training_cpu.c
_PANEL = 32  # columns of a panel of packed numbers, or more
_SERIAL_ELEMENTS = 1 << 13  # below this, a second thread costs more than it takes over
_SERIAL_PRODUCTS = 1 << 19
_FEW_ROWS = 64  # of products that read their other matrix about once

_library = load_library("_training_cpu", "hf_training_version", _VERSION)
_library.hf_training_instruction_level.argtypes = (ctypes.c_int,)
use_pool(_library, "training")
# Tensors of a struct in training_cpu.c, in order, and the passes that take this struct.
_GATED = ("gate", "value", "to", "moments", "grad", "grad_gate", "grad_value")
_COEFFICIENTS = (
    *("recurrence_gate", "rate", "input_gate", "inputs", "decay", "scaled", "grad_decay", "grad_scaled"),
    *("grad_recurrence_gate", "grad_input_gate", "grad_inputs", "grad_rate"),
)
_NORM = ("x", "weight", "to", "scales", "grad", "grad_weight", "plus", "normed")
_CROSS_ENTROPY = ("logits", "targets", "nats", "grad", "kept", "grad_logits")
_CONVOLUTION = (
    *("inputs", "taps", "weight", "resets", "to", "last"),
    *("grad", "grad_inputs", "grad_taps", "grad_weight", "grad_last"),
)
_TABLE = ("table", "lookups", "order", "ranks", "values", "grad", "found", "sums", "addresses")
_TENSORS = {"gated_norm": _GATED, "gated_gelu": _GATED, "gate_coefficients": _COEFFICIENTS, "rms_norm": _NORM}
_TENSORS |= {"cross_entropy": _CROSS_ENTROPY, "temporal_convolution": _CONVOLUTION}
_TENSORS |= {f"{name}_backward": tensors for name, tensors in _TENSORS.items()}
_TENSORS |= dict.fromkeys(("table_sum", "table_gradient", "table_adagrad"), _TABLE)
_OTHER_TYPES = dict.fromkeys(("targets", "lookups", "order", "ranks", "found", "addresses"), torch.long)
_OTHER_TYPES["resets"] = torch.bool
_TYPES = {torch.float32: "float32", torch.float64: "float64"}


def _function(name: str):
    function = getattr(_library, f"hf_{name}")
    function.argtypes, function.restype = (ctypes.c_char_p,), None
    return function


_functions = {
    (name, dtype): _function(f"{name}_{suffix}")
    for dtype, suffix in _TYPES.items()
    for name in ("products", "few_products", *_TENSORS)
}


_table_order = _function("table_order")
_table_order.restype = ctypes.c_int64


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


def has_bf16_products() -> bool:
    """True where the processor multiplies bfloat16 numbers (AVX512-BF16)."""
    return bool(_library.hf_training_has_bf16())


def has_fast_bf16_products() -> bool:
    """True where it multiplies them faster than float32 numbers. Intel's processors do not."""
    return bool(_library.hf_training_has_fast_bf16())


def multiply(products: Sequence[tuple[Tensor, Tensor, Tensor, bool]], *, rounded: bool = False) -> None:
    """Compute `to = a @ b`, or `to += a @ b`, for each (a, b, to, add), side by side.

    Products of the same `to`, one right after the other, are added up in this order; otherwise no product may read or
    write the result of another.

    Args:
        products: matrices, of which `to` has columns that are neighbours in memory.
        rounded: round the elements of a and b, in float32, to bfloat16; sums are in float32. It needs
            [`has_bf16_products`].
    """
    dtype = products[0][0].dtype
    if is_simulated():
        packed = (_packed(a, b, _is_few(a, b, rounded)) for a, b, _, _ in products)
        simulated = [_panels(matrix, dtype) for matrix in packed if matrix is not None]
        del simulated  # all of them at once, as below
        return
    panels_of, before, before_is_few, operations = {}, None, False, 0
    few, many = [], []  # fields of products with few rows, and of others
    of_transposed = None  # b of the product before, if its a is transposed and it adds to nothing
    kept = []  # copies and packed matrices live until the call
    for a, b, to, add in products:
        a, b = _with_neighbours(a), _with_neighbours(b)
        kept.append((a, b))
        (rows, depth), width = a.shape, b.shape[1]
        of_a = address("a", a, dtype, rows * depth, strided=True), *a.stride()
        of_b = address("b", b, dtype, depth * width, strided=True), *b.stride()
        of_to = address("to", to, dtype, rows * width, strided=True), to.stride(0)
        continues = add and of_to[0] == before
        is_few = _is_few(a, b, rounded) and (before_is_few or not continues)
        fields, continues = few if is_few else many, continues and is_few == before_is_few
        panels, is_new, shares, is_transposed = 0, False, False, of_a[2] != 1
        if (matrix := _packed(a, b, is_few)) is not None:
            found = (*(of_a if is_few else of_b), *matrix.shape)
            if is_new := found not in panels_of:
                panels_of[found] = _panels(matrix, dtype)
            panels = panels_of[found].data_ptr()
        elif is_transposed:
            shares = (of_b, b.shape) == of_transposed and not add
            if continues:
                fields[-2] = False  # the product before does not share b, if it did
        of_transposed = (of_b, b.shape) if is_transposed and not add else None
        fields += (rows, depth, width, *of_a, *of_b, *of_to, add, panels, is_new, continues, shares, 0)
        before, before_is_few, operations = of_to[0], is_few, operations + rows * depth * width
    threads = free_threads() if operations >= _SERIAL_PRODUCTS else 1
    for name, fields in {"few_products": few, "products": many}.items():
        if fields:
            header = threads, len(fields) // _FIELDS, rounded
            _functions[name, dtype](struct.pack(f"={3 + len(fields)}q", *header, *fields))


def _with_neighbours(matrix: Tensor) -> Tensor:
    """The matrix, or a copy, of which rows or columns are neighbours in memory."""
    return matrix if 1 in matrix.stride() else matrix.contiguous()


def _is_few(a: Tensor, b: Tensor, rounded: bool) -> bool:
    """True for products that few_rows.h computes faster than products.h; if their results add up, all have to be."""
    # Where b is transposed, whole panels of rows are computed.
    wastes = b.stride(1) != 1 and len(a) > _PANEL and -len(a) % _PANEL > _PANEL // 2
    return a.stride(1) == 1 and len(a) <= _FEW_ROWS and not (wastes or rounded)


def _packed(a: Tensor, b: Tensor, is_few: bool) -> Tensor | None:
    """The matrix that is packed before the product: of few rows aᵀ, and only where b is transposed in memory."""
    if is_few:
        return None if b.stride(1) == 1 else a.T
    return b if a.stride(1) == 1 else None


def _panels(b: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for a matrix (depth, width) as panels."""
    depth, width = b.shape
    return RESULTS.empty(torch.Size((-(-width // _PANEL) * _PANEL * depth,)), dtype)


# ---- Passes over rows ----

Given = dict[str, tuple[Tensor, int]]  # name → contiguous tensor, and the number of elements that it must have


def _run(name: str, dtype: torch.dtype, sizes: Sequence[int], numbers: Sequence[float], given: Given) -> None:
    """Run a pass; nothing with [`simulated_kernels`].

    Args:
        name: of the pass.
        dtype: of its tensors but those in `_OTHER_TYPES`.
        sizes: rows, width, and what its struct has after them.
        numbers: of its struct.
        given: the tensors that the pass reads or writes.
    """
    if is_simulated():
        return
    threads = free_threads() if sizes[0] * sizes[1] >= _SERIAL_ELEMENTS else 1
    pointers = dict.fromkeys(_TENSORS[name], 0)
    for each, (tensor, elements) in given.items():
        pointers[each] = address(each, tensor, _OTHER_TYPES.get(each, dtype), elements)
    layout = f"={1 + len(sizes)}q{len(numbers)}d{len(pointers)}q"
    _functions[name, dtype](struct.pack(layout, threads, *sizes, *numbers, *pointers.values()))


def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor in memory that is used again."""
    return RESULTS.empty(shape, dtype)


def _like(tensor: Tensor) -> Tensor:
    return empty(tensor.shape, tensor.dtype)


def _rows_and_width(tensor: Tensor) -> tuple[int, int]:
    return tensor.numel() // tensor.shape[-1], tensor.shape[-1]


def gated_norm(gate: Tensor, value: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """LN( GeLU(LN(gate)) ∘ LN(value) ), (…, width), and the moments (rows, 6) for the backward pass."""
    sizes, n = _rows_and_width(gate), gate.numel()
    to, moments = _like(gate), gate.new_empty(sizes[0], 6)
    given = {"gate": (gate.contiguous(), n), "value": (value.contiguous(), n), "to": (to, n)}
    _run("gated_norm", gate.dtype, sizes, (eps,), given | {"moments": (moments, 6 * sizes[0])})
    return to, moments


def gated_norm_backward(
    gate: Tensor, value: Tensor, moments: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `value`."""
    given = {"moments": (moments, 6 * _rows_and_width(gate)[0])}
    return _gated_backward("gated_norm_backward", gate, value, grad, eps, given)


def gated_gelu(gate: Tensor, value: Tensor) -> Tensor:
    """GeLU(gate) ∘ value, (…, width)."""
    to, n = _like(gate), gate.numel()
    given = {"gate": (gate.contiguous(), n), "value": (value.contiguous(), n), "to": (to, n)}
    _run("gated_gelu", gate.dtype, _rows_and_width(gate), (0.0,), given)
    return to


def gated_gelu_backward(gate: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `gate` and `value`."""
    return _gated_backward("gated_gelu_backward", gate, value, grad, 0.0, {})


def _gated_backward(
    name: str, gate: Tensor, value: Tensor, grad: Tensor, eps: float, given: Given
) -> tuple[Tensor, Tensor]:
    names, n, grads = ("gate", "value", "grad", "grad_gate", "grad_value"), gate.numel(), (_like(gate), _like(value))
    tensors = (gate.contiguous(), value.contiguous(), grad.contiguous(), *grads)
    given = given | {each: (tensor, n) for each, tensor in zip(names, tensors, strict=True)}
    _run(name, gate.dtype, _rows_and_width(gate), (eps,), given)
    return grads


def gate_coefficients(
    recurrence_gate: Tensor, rate: Tensor, input_gate: Tensor, inputs: Tensor, sigmoid_gate: bool = False
) -> tuple[Tensor, Tensor]:
    """r = exp(-rate ∘ σ(recurrence_gate)) and sqrt(1 - r²) ∘ input_gate ∘ inputs, (…, S) with rates (S,) or (…, S).

    Args:
        sigmoid_gate: σ(input_gate) takes the place of the input gate.
    """
    results = _like(recurrence_gate), _like(recurrence_gate)
    given = _coefficients_given(recurrence_gate, rate, input_gate, inputs, decay=results[0], scaled=results[1])
    sizes = _coefficients_sizes(recurrence_gate, rate, sigmoid_gate)
    _run("gate_coefficients", recurrence_gate.dtype, sizes, (), given)
    return results


def _coefficients_sizes(recurrence_gate: Tensor, rate: Tensor, sigmoid_gate: bool) -> tuple[int, int, int, bool]:
    rows, width = _rows_and_width(recurrence_gate)
    return rows, width, 1 if rate.dim() == 1 else rows, sigmoid_gate


def gate_coefficients_backward(
    recurrence_gate: Tensor,
    rate: Tensor,
    input_gate: Tensor,
    inputs: Tensor,
    grad_decay: Tensor,
    grad_scaled: Tensor,
    sigmoid_gate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the four arguments of [`gate_coefficients`]."""
    sizes = _coefficients_sizes(recurrence_gate, rate, sigmoid_gate)
    grads = [_like(recurrence_gate) for _ in range(3)]
    of_rate = rate.new_empty(_chunks(sizes[0]), sizes[1]) if rate.dim() == 1 else _like(rate)
    names = ("grad_recurrence_gate", "grad_input_gate", "grad_inputs")
    more = {"grad_decay": grad_decay, "grad_scaled": grad_scaled, **dict(zip(names, grads, strict=True))}
    given = _coefficients_given(recurrence_gate, rate, input_gate, inputs, **more)
    given["grad_rate"] = of_rate, of_rate.numel()
    _run("gate_coefficients_backward", recurrence_gate.dtype, sizes, (), given)
    return grads[0], of_rate.sum(0) if rate.dim() == 1 else of_rate, *grads[1:]


def _coefficients_given(
    recurrence_gate: Tensor, rate: Tensor, input_gate: Tensor, inputs: Tensor, **more: Tensor
) -> Given:
    n = recurrence_gate.numel()
    tensors = {"recurrence_gate": recurrence_gate, "input_gate": input_gate, "inputs": inputs, **more}
    given = {name: (tensor.contiguous(), n) for name, tensor in tensors.items()}
    return given | {"rate": (rate.contiguous(), recurrence_gate.shape[-1] if rate.dim() == 1 else n)}


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """weight ∘ x / sqrt(mean(x²) + eps), (…, width), and the scales (rows,) for the backward pass."""
    to, sizes = _like(x), _rows_and_width(x)
    scales = x.new_empty(sizes[0])
    given = {"x": (x.contiguous(), x.numel()), "to": (to, x.numel()), "scales": (scales, sizes[0])}
    if weight is not None:
        given["weight"] = weight.contiguous(), sizes[1]
    _run("rms_norm", x.dtype, sizes, (eps,), given)
    return to, scales


def rms_norm_backward(
    x: Tensor, weight: Tensor | None, scales: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `x` and `weight`."""
    grad_x, sizes, sums = _like(x), _rows_and_width(x), None
    given = {"x": (x.contiguous(), x.numel()), "to": (grad_x, x.numel()), "scales": (scales, sizes[0])}
    given["grad"] = grad.contiguous(), x.numel()
    if weight is not None:
        sums = x.new_empty(_chunks(sizes[0]), sizes[1])
        given |= {"weight": (weight.contiguous(), sizes[1]), "grad_weight": (sums, sums.numel())}
    _run("rms_norm_backward", x.dtype, sizes, (eps,), given)
    return grad_x, None if sums is None else sums.sum(0)


def temporal_convolution(inputs: Tensor, taps: Tensor, weight: Tensor, reset_mask: Tensor | None) -> Tensor:
    """y_t = Σ_k w_k ∘ x_{t-k}: inputs (B, T, S), the inputs before (B, K-1, S), weights (K, S), bool (B, T)."""
    to, (sizes, given) = _like(inputs), _convolution_given(inputs, taps, weight, reset_mask)
    _run("temporal_convolution", inputs.dtype, sizes, (), given | {"to": (to, to.numel())})
    return to


def temporal_convolution_backward(
    inputs: Tensor, taps: Tensor, weight: Tensor, reset_mask: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of inputs, taps and weight."""
    sizes, given = _convolution_given(inputs, taps, weight, reset_mask)
    sums = weight.new_empty(_chunks(sizes[0]), *weight.shape)
    grads = {"grad_inputs": _like(inputs), "grad_taps": torch.empty_like(given["taps"][0]), "grad_weight": sums}
    given["grad"] = grad.contiguous(), inputs.numel()
    given |= {name: (tensor, tensor.numel()) for name, tensor in grads.items()}
    _run("temporal_convolution_backward", inputs.dtype, sizes, (), given)
    return grads["grad_inputs"], grads["grad_taps"], sums.sum(0)


def _convolution_given(
    inputs: Tensor, taps: Tensor, weight: Tensor, reset_mask: Tensor | None
) -> tuple[tuple[int, ...], Given]:
    (streams, steps, width), lags = inputs.shape, len(weight)
    given = {"inputs": (inputs.contiguous(), inputs.numel()), "weight": (weight.contiguous(), lags * width)}
    given["taps"] = taps.contiguous(), streams * (lags - 1) * width
    if reset_mask is not None:
        given["resets"] = reset_mask.contiguous(), streams * steps
    return (streams * steps, width, steps, lags), given


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """-log softmax(logits)[target] of each row, zero where the target is `ignored`, and what the gradient needs.

    `ignored` is negative. Raises IndexError if another target is not a column.
    """
    sizes = _rows_and_width(logits)
    if targets.numel() and not is_simulated():
        least, most = torch.aminmax(targets)
        if most >= sizes[1] or (least < 0 and bool(((targets < 0) & (targets != ignored)).any())):
            raise IndexError(
                f"A target is out of bounds: logits have {sizes[1]} columns, targets are {least} to {most}."
            )
    nats, kept = logits.new_empty(sizes[0]), logits.new_empty(sizes[0], 2)
    _run("cross_entropy", logits.dtype, sizes, (), _loss_given(logits, targets, kept) | {"nats": (nats, sizes[0])})
    return nats, kept


def cross_entropy_backward(logits: Tensor, targets: Tensor, kept: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the logits, given each row's gradient of its loss (rows,)."""
    to, sizes = _like(logits), _rows_and_width(logits)
    given = {"grad": (grad.contiguous(), sizes[0]), "grad_logits": (to, to.numel())}
    _run("cross_entropy_backward", logits.dtype, sizes, (), _loss_given(logits, targets, kept) | given)
    return to


def _loss_given(logits: Tensor, targets: Tensor, kept: Tensor) -> Given:
    rows = _rows_and_width(logits)[0]
    given = {"logits": (logits.contiguous(), logits.numel()), "kept": (kept, 2 * rows)}
    return given | {"targets": (targets.contiguous(), rows)}


def _chunks(rows: int) -> int:
    return -(-rows // _CHUNK)


# ---- Tables of which a step reads few rows ----


def table_sum(table: Tensor, lookups: Tensor) -> Tensor:
    """The sums (…, width) of the rows `lookups` (…, n) of a table (rows, width)."""
    width, (*outer, group) = table.shape[1], lookups.shape
    result = empty(torch.Size((*outer, width)), table.dtype)
    given = {"lookups": (lookups.contiguous(), lookups.numel()), "values": (result, result.numel())}
    _run_table("table_sum", table, lookups.numel() // group, group, given)
    return result


def table_gradient(table: Tensor, lookups: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the rows that [`table_sum`] read, ascending, and their gradients (n, width)."""
    width, group = table.shape[1], lookups.shape[-1]
    if not is_simulated():
        check_lookups(lookups, len(table))
    given = {"grad": (grad.contiguous(), lookups.numel() // group * width)}
    return _sum_rows(lookups.flatten(), width, group, table.dtype, given)


def add_rows(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The sum of gradients of rows, likewise; each has the numbers (n,) of its rows, and gradients (n, width)."""
    (_, first), *_ = parts
    dtype, (_, width) = first.dtype, first.shape
    row_bytes, addresses = width * dtype.itemsize, []
    for rows, values in parts:
        begin = 0 if is_simulated() else address("values", values, dtype, len(rows) * width)
        addresses.append(torch.arange(len(rows)).mul_(row_bytes).add_(begin))
    lookups = torch.cat([rows for rows, _ in parts])
    return _sum_rows(lookups, width, 1, dtype, {"addresses": (torch.cat(addresses), len(lookups))})


def _sum_rows(lookups: Tensor, width: int, group: int, dtype: torch.dtype, given: Given) -> tuple[Tensor, Tensor]:
    """The lookups (n,) that differ, ascending, and for each the sum of the given gradients."""
    n = len(lookups)
    ordered, order, ranks, count = table_order(lookups)
    found, values = ordered.new_empty(count), empty(torch.Size((count, width)), dtype)
    given |= {"lookups": (ordered, n), "order": (order, n), "ranks": (ranks, n), "found": (found, count)}
    given["values"] = values, count * width
    _run("table_gradient", dtype, (n, width, group), (0.0, 0.0), given)
    return found, values


def table_order(lookups: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Lookups (n,), ascending and stable; their places; how many smaller ones differ; how many differ in all."""
    n = count = len(lookups)
    ordered, order, ranks, more = (torch.empty(size, dtype=torch.long) for size in (n, n, n, 2 * n))
    if not is_simulated():
        given = {"lookups": lookups, "order": order, "ranks": ranks, "values": more, "found": ordered}
        pointers = dict.fromkeys(_TABLE, 0)
        pointers |= {name: address(name, tensor, torch.long, tensor.numel()) for name, tensor in given.items()}
        count = _table_order(struct.pack(f"=4q2d{len(_TABLE)}q", 1, n, 1, 1, 0.0, 0.0, *pointers.values()))
    return ordered, order, ranks, count


def table_adagrad(table: Tensor, sums: Tensor, rows: Tensor, grad: Tensor, rate: float, eps: float) -> None:
    """One step of row-wise Adagrad for rows that differ; `sums`, one for each row of the table, and `table` change."""
    given = {"lookups": (rows.contiguous(), len(rows)), "sums": (sums, len(table))}
    given["grad"] = grad.contiguous(), len(rows) * table.shape[1]
    _run_table("table_adagrad", table, len(rows), 1, given, rate, eps)


def _run_table(
    name: str, table: Tensor, rows: int, group: int, given: Given, rate: float = 0.0, eps: float = 0.0
) -> None:
    """Run a pass over `rows` outputs, lookups or rows of a table."""
    if not is_simulated():
        check_lookups(given["lookups"][0], len(table))
    sizes, given = (rows, table.shape[1], group), given | {"table": (table, table.numel())}
    _run(name, table.dtype, sizes, (rate, eps), given)
