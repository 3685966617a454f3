"""Chains of the passes of `training_cpu`: calls that run one pass after another on as many rows as stay in the caches.

A thread takes the rows of a stream, 64 at a time, through all passes of a chain. Every row has the bits that it has in
calls of the single passes, and so have sums over rows.

A chain is made once for all tensors of some shapes, from symbols in place of their addresses; a call gives it the
addresses. Whoever calls it keeps the tensors alive.
"""

import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from .output_memory import is_simulated
from .training_cpu import _CHUNK, _FIELDS, _PANEL, _functions, _library, empty

LINE = 64  # bytes to which parts of a workspace are aligned
MOST_THREADS = 63  # a bit for each
_ADDRESS_BITS = 48  # of addresses; above them is the number of a symbol
_MOST_SYMBOLS = 255  # doubles that are not denormal have larger ones
_HEADER = 14  # words of the struct chain
_PASSES = {
    name: number
    for number, name in enumerate(
        (
            *("product", "rms_norm", "rms_norm_backward", "gated_norm", "gated_norm_backward"),
            *("gated_recurrence", "gated_recurrence_backward", "gated_gelu", "gated_gelu_backward"),
            *("temporal_convolution", "temporal_convolution_backward"),
        )
    )
}
_CHAINS = {}
for _dtype, _suffix in {torch.float32: "float32", torch.float64: "float64"}.items():
    _CHAINS[_dtype] = getattr(_library, f"hf_chain_{_suffix}")
    _CHAINS[_dtype].argtypes, _CHAINS[_dtype].restype = _functions["products", _dtype].argtypes, None


def symbols(names: Sequence[str]) -> dict[str, int]:
    """A number for each name that stands for an address; offsets may be added to it."""
    return {name: (number + 1) << _ADDRESS_BITS for number, name in enumerate(names)}


class Template:
    """A call of a kernel whose addresses are symbols.

    Args:
        function: of the kernel.
        words: of its struct.
        size: bytes of the workspace that it needs.
    """

    def __init__(self, function, words: Sequence[int], size: int = 0):
        self.size, self._function = size, function
        self._words = np.array(words, np.int64)
        numbers = self._words >> _ADDRESS_BITS
        self._places = np.flatnonzero((numbers > 0) & (numbers <= _MOST_SYMBOLS))
        self._numbers = numbers[self._places] - 1
        self._words[self._places] &= (1 << _ADDRESS_BITS) - 1

    def run(self, addresses: np.ndarray) -> None:
        """Call the kernel with these addresses (int64), in the order of the names in [`symbols`]."""
        words = self._words.copy()
        words[self._places] += addresses[self._numbers]
        self._function(words.tobytes())


@cache
def _bits(number: float) -> int:
    """A double as an integer of the same bits."""
    return struct.unpack("=q", struct.pack("=d", number))[0]


def aligned(size: int) -> int:
    """That many bytes, up to the next line."""
    return -(-size // LINE) * LINE


_own = threading.local()


def workspace(size: int, dtype: torch.dtype) -> int:
    """The address of that many bytes of this thread, until it asks for others; 0 where kernels are simulated."""
    memory = getattr(_own, "memory", None)
    if is_simulated() or memory is None or memory.nbytes < size:
        memory = empty(torch.Size((-(-size // dtype.itemsize),)), dtype)
    if is_simulated():
        return 0
    _own.memory = memory
    return memory.data_ptr()


class Rows(NamedTuple):
    """The rows of a chain: streams, and steps of each."""

    streams: int
    steps: int

    @property
    def count(self) -> int:
        return self.streams * self.steps


class Layout:
    """Offsets of arrays in one tensor; each begins at a line of the cache, if the tensor does."""

    def __init__(self, widths: dict[str, int], rows: int, item_size: int):
        self.offsets, at = {}, 0
        for name, width in widths.items():
            self.offsets[name] = at
            at += aligned(rows * width * item_size)
        self.elements = at // item_size

    def pointers(self, begin: int) -> dict[str, int]:
        """Their addresses, by name, in a tensor at `begin`."""
        return {name: begin + offset for name, offset in self.offsets.items()}


class Chain:
    """Passes that run one after another on each tile of rows.

    Args:
        rows: of all matrices.
        memory: symbol of the workspace.
        threads: at most [`MOST_THREADS`].
        rounded: products as in `training_cpu.multiply`.
        descends: the last rows come first.
    """

    def __init__(
        self, dtype: torch.dtype, rows: Rows, memory: int, *, threads: int, rounded: bool, descends: bool = False
    ):
        self._dtype, self._rows, self._memory, self._threads = dtype, rows, memory, threads
        self._rounded, self._descends = rounded, descends
        self._stages: list[tuple[int, Sequence[int]]] = []  # number of the pass, and its struct
        self._panel_bytes = self._local_bytes = 0
        self._local_widths: dict[int, int] = {}
        self._given: list[int] = []

    def _product(self, depth, width, a, b, b_depth, b_column, to, add, plus) -> None:
        panels = self._memory + self._panel_bytes
        self._panel_bytes += aligned(-(-width // _PANEL) * _PANEL * depth * self._dtype.itemsize)
        of_a, of_b = (a, depth, 1), (b, b_depth, b_column)
        words = (self._rows.count, depth, width, *of_a, *of_b, to, width, add, panels, 1, 0, 0, plus)
        self._pass("product", words)

    def map(self, x: int, weight: int, outputs: int, inputs: int, to: int, plus: int = 0) -> None:
        """`to` = x · weightᵀ, plus a matrix, for a weight (outputs, inputs)."""
        self._product(inputs, outputs, x, weight, 1, inputs, to, 0, plus)

    def map_backward(
        self, grad: int, weight: int, outputs: int, inputs: int, to: int, add=False, plus: int = 0
    ) -> None:
        """`to` = grad · weight, or with `add` +=, plus a matrix."""
        self._product(outputs, inputs, grad, weight, inputs, 1, to, add, plus)

    def _pass(self, name: str, words: Sequence[int]) -> None:
        self._stages.append((_PASSES[name], words))

    def rms_norm(self, eps: float, width: int, x: int, weight: int, to: int, scales: int) -> None:
        sizes = 1, self._rows.count, width
        self._pass("rms_norm", (*sizes, _bits(eps), x, weight, to, scales, 0, 0, 0, 0))

    def rms_norm_backward(self, eps, width, x, weight, scales, grad, to, grad_weight, plus, normed) -> None:
        """`to` is the gradient of x, plus a matrix; `normed` is the output once more."""
        sizes = 1, self._rows.count, width
        self._pass("rms_norm_backward", (*sizes, _bits(eps), x, weight, to, scales, grad, grad_weight, plus, normed))

    def gated_norm(self, eps: float, width: int, gate: int, value: int, to: int, moments: int) -> None:
        sizes = 1, self._rows.count, width
        self._pass("gated_norm", (*sizes, _bits(eps), gate, value, to, moments, 0, 0, 0))

    def gated_norm_backward(self, eps, width, gate, value, moments, grad, grad_gate, grad_value, to) -> None:
        """`to` is the output once more."""
        sizes = 1, self._rows.count, width
        self._pass("gated_norm_backward", (*sizes, _bits(eps), gate, value, to, moments, grad, grad_gate, grad_value))

    def gated_gelu(self, width: int, gate: int, value: int, to: int) -> None:
        sizes = 1, self._rows.count, width
        self._pass("gated_gelu", (*sizes, _bits(0.0), gate, value, to, 0, 0, 0, 0))

    def gated_gelu_backward(self, width, gate, value, grad, grad_gate, grad_value, to) -> None:
        """`to` is the output once more."""
        sizes = 1, self._rows.count, width
        self._pass("gated_gelu_backward", (*sizes, _bits(0.0), gate, value, to, 0, grad, grad_gate, grad_value))

    def convolution(self, width, lags, inputs, taps, weight, resets, to, last) -> None:
        """`last`: memory for the last inputs of each stream, at most lags - 1."""
        sizes = 1, self._rows.count, width, self._rows.steps, lags
        self._pass("temporal_convolution", (*sizes, inputs, taps, weight, resets, to, last, *[0] * 5))

    def convolution_backward(
        self, width, lags, inputs, taps, weight, resets, *, grad, grad_last, grad_inputs, grad_taps, grad_weight
    ) -> None:
        sizes, given = (1, self._rows.count, width, self._rows.steps, lags), (inputs, taps, weight, resets, 0, 0)
        words = (*sizes, *given, grad, grad_inputs, grad_taps, grad_weight, grad_last)
        self._pass("temporal_convolution_backward", words)

    def recurrence(self, width, kept, rate, initial, resets, last, sigmoid_gate=False) -> None:
        """`kept`: the gates, inputs and states, by name; `sigmoid_gate` as in `training_cpu.gate_coefficients`."""
        words = self._recurrence_words(width, kept, rate, initial, resets, last, sigmoid_gate)
        self._pass("gated_recurrence", (*words, *[0] * 8))

    def recurrence_backward(
        self, width, kept, grads, rate, initial, resets, *, grad_states, log_decays, grad_rate, sigmoid_gate=False
    ) -> None:
        """`log_decays` is memory for as many numbers as there are states."""
        words = self._recurrence_words(width, kept, rate, initial, resets, 0, sigmoid_gate)
        words += (grad_states, grads["last"], grads["state"])
        words += (*(grads[name] for name in ("recurrence_gate", "input_gate", "inputs")), log_decays, grad_rate)
        self._pass("gated_recurrence_backward", words)

    def _recurrence_words(self, width, kept, rate, initial, resets, last, sigmoid_gate) -> tuple[int, ...]:
        sizes = self._rows.count, width, self._rows.steps, sigmoid_gate
        gates = kept["recurrence_gate"], rate, kept["input_gate"], kept["inputs"]
        return (*sizes, *gates, initial, resets, kept["states"], last)

    def reads(self, width: int, *begins: int) -> None:
        """Matrices of `width` columns that the passes find in memory: products ask for the rows of the next tile."""
        for begin in begins:
            self._given += (begin, width * self._dtype.itemsize)

    def local(self, width: int) -> int:
        """In place of an address: memory of each thread for the rows of a tile."""
        found = -1 - self._local_bytes
        self._local_widths[found] = width
        self._local_bytes += aligned(_CHUNK * width * self._dtype.itemsize)
        return found

    def template(self) -> Template:
        """The call; its workspace has packed weights, then a part for each thread."""
        product = _PASSES["product"]
        products = [words for number, words in self._stages if number == product]
        others = [words for number, words in self._stages if number != product]
        at = _HEADER + 2 * len(self._stages) + 3
        starts = {product: at, None: at + _FIELDS * len(products)}
        stages = []
        for number, words in self._stages:
            kind = product if number == product else None
            stages += (number, 8 * starts[kind])
            starts[kind] += len(words)
        body = [*stages, 1, len(products), self._rounded]
        for each in (*products, *others):
            body += each
        locals_at, item_size, pointers = _HEADER + len(body), self._dtype.itemsize, []
        for place, word in enumerate(body, _HEADER):
            if word < 0:
                pointers += (place, self._local_widths[word] * item_size, -1 - word)
        given_at = locals_at + len(pointers)
        words = given_at + len(self._given)
        thread_bytes = aligned(8 * words + self._local_bytes)
        header = [
            self._threads, self._rows.count, max(self._rows.steps, _CHUNK), self._descends, self._rounded,
            8 * (at - 3), 8 * locals_at, len(pointers) // 3, words, 8 * given_at, len(self._given) // 2,
            self._memory + self._panel_bytes, thread_bytes, len(self._stages),
        ]  # fmt: skip
        size = self._panel_bytes + self._threads * thread_bytes
        return Template(_CHAINS[self._dtype], [*header, *body, *pointers, *self._given], size)


def weight_gradients(
    dtype: torch.dtype, maps: Sequence[tuple[int, int, int, int, int]], rows: int, threads: int, *, rounded: bool
) -> list[Template]:
    """Gradients of matrices, gradᵀ · input, in one call; none without maps.

    Args:
        maps: gradient, outputs, input and inputs of each map, and where its result goes.
    """
    words, before = [], 0
    for grad, outputs, inputs, width, result in maps:
        shares, before = inputs == before, inputs
        words += (outputs, rows, width, grad, 1, outputs, inputs, width, 1, result, width, 0, 0, 0, 0, shares, 0)
    return [Template(_functions["products", dtype], [threads, len(maps), rounded, *words])] if maps else []
