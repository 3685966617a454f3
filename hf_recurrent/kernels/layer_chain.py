"""Chains of passes of `training_cpu.c` over rows: words of its structs, prepared once for many calls.

Sizes, options and offsets are the same in every call of a layer, and only the addresses of its tensors differ. So the
words are computed once, and a call adds the addresses.
"""

import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from .training_cpu import _CHUNK, _PANEL, _functions, _library

_LINE = 64  # bytes to which parts of a workspace are aligned
_HEADER, _PRODUCT = 12, 17  # words of the structs chain and product in training_cpu.c
MOST_THREADS = 63  # a bit for each
_PASSES = {
    name: number
    for number, name in enumerate(
        (
            *("product", "rms_norm", "rms_norm_backward", "gated_norm", "gated_norm_backward"),
            *("gated_recurrence", "gated_recurrence_backward"),
        )
    )
}
_CHAINS = {}
for _dtype, _suffix in {torch.float32: "float32", torch.float64: "float64"}.items():
    _CHAINS[_dtype] = getattr(_library, f"hf_chain_{_suffix}")
    _CHAINS[_dtype].argtypes, _CHAINS[_dtype].restype = _functions["products", _dtype].argtypes, None


class Pointer(NamedTuple):
    """An address of a call: `offset` bytes after the tensor with the number `base` in its list of addresses."""

    base: int
    offset: int = 0


Word = int | Pointer
# Calls into the library: its function, by type of call and of tensors, and the words of its struct.
Call = tuple[Callable[[bytes], None], Sequence[Word]]


class Template:
    """Calls that run one after another, with the addresses of their tensors left out."""

    def __init__(self, calls: Sequence[Call]):
        words = [word for _, each in calls for word in each]
        pointers = [(place, word) for place, word in enumerate(words) if isinstance(word, Pointer)]
        self._words = np.array([word.offset if isinstance(word, Pointer) else word for word in words], np.int64)
        self._places = np.array([place for place, _ in pointers], np.int64)
        self._bases = np.array([pointer.base for _, pointer in pointers], np.int64)
        self._calls, begin = [], 0
        for function, each in calls:
            self._calls.append((function, 8 * begin, 8 * (begin + len(each))))
            begin += len(each)

    def run(self, addresses: Sequence[int]) -> None:
        """Compute with tensors at these addresses, which must be alive; 0 where an optional tensor is not given."""
        words = self._words.copy()  # a call of its own for each thread
        words[self._places] += np.array(addresses, np.int64)[self._bases]
        data = words.tobytes()
        for function, begin, end in self._calls:
            function(data[begin:end])


def aligned(size: int) -> int:
    """A size in bytes, rounded up to whole lines of the cache."""
    return -(-size // _LINE) * _LINE


def weight_gradients(
    maps: Sequence[tuple[Pointer, int, Pointer, int, Pointer]],
    rows: int,
    dtype: torch.dtype,
    *,
    threads: int,
    rounded: bool,
) -> list[Call]:
    """A call that computes gradᵀ · input for each (grad, outputs, input, inputs, result); none without maps."""
    words, before = [threads, len(maps), rounded], None
    for grad, outputs, inputs, width, result in maps:
        shares, before = inputs == before, inputs
        words += (outputs, rows, width, grad, 1, outputs, inputs, width, 1, result, width)
        words += (0, 0, 0, 0, shares, 0)
    return [(_functions["products", dtype], words)] if maps else []


@cache
def _bits(number: float) -> int:
    """A double as an integer of the same bits."""
    return struct.unpack("=q", struct.pack("=d", number))[0]


class Chain:
    """Passes that run one after another on each tile of rows.

    Args:
        sizes: (rows, steps of a stream, model width, state width).
        workspace: memory of as many bytes as [`Chain.call`] returns.
        rounded: as in `training_cpu.multiply`.
        descends: the last rows come first.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        sizes: tuple[int, int, int, int],
        workspace: Pointer,
        *,
        threads: int,
        rounded: bool,
        descends: bool = False,
    ):
        self._dtype, self._rounded, self._descends = dtype, rounded, descends
        self._rows, self._steps, self._model, self._state = sizes
        self._threads, self._workspace = min(threads, MOST_THREADS), workspace
        self._stages: list[tuple[int, Sequence[Word]]] = []  # number of the pass, and its struct
        self._panel_bytes = self._local_bytes = 0
        self._local_widths: dict[int, int] = {}

    def _product(self, depth, width, a, b, b_depth, b_column, to, add, plus) -> None:
        panels = Pointer(self._workspace.base, self._workspace.offset + self._panel_bytes)
        self._panel_bytes += -(-width // _PANEL) * _PANEL * depth * self._dtype.itemsize
        of_a, of_b = (a, depth, 1), (b, b_depth, b_column)
        words = (self._rows, depth, width, *of_a, *of_b, to, width, add, panels, 1, 0, 0, plus)
        self._pass("product", words)

    def map(self, x: Word, weight: Word, outputs: int, inputs: int, to: Word, plus: Word = 0) -> None:
        """`to` = x · weightᵀ, plus a matrix, for a weight (outputs, inputs)."""
        self._product(inputs, outputs, x, weight, 1, inputs, to, 0, plus)

    def map_backward(self, grad: Word, weight: Word, outputs: int, inputs: int, to: Word, add: bool = False) -> None:
        """`to` = grad · weight, or with `add` +=."""
        self._product(outputs, inputs, grad, weight, inputs, 1, to, add, 0)

    def _pass(self, name: str, words: Sequence[Word]) -> None:
        self._stages.append((_PASSES[name], words))

    def rms_norm(self, eps: float, x: Word, weight: Word, to: Word, scales: Word) -> None:
        self._pass("rms_norm", (1, self._rows, self._model, _bits(eps), x, weight, to, scales, 0, 0, 0))

    def rms_norm_backward(self, eps, x, weight, scales, grad, to, grad_weight, plus) -> None:
        """`to` is the gradient of x, plus a matrix."""
        sizes = 1, self._rows, self._model
        self._pass("rms_norm_backward", (*sizes, _bits(eps), x, weight, to, scales, grad, grad_weight, plus))

    def gated_norm(self, eps: float, width: int, gate: Word, value: Word, to: Word, moments: Word) -> None:
        sizes = 1, self._rows, width
        self._pass("gated_norm", (*sizes, _bits(eps), gate, value, to, moments, 0, 0, 0))

    def gated_norm_backward(self, eps, width, gate, value, moments, grad, grad_gate, grad_value) -> None:
        sizes = 1, self._rows, width
        self._pass("gated_norm_backward", (*sizes, _bits(eps), gate, value, 0, moments, grad, grad_gate, grad_value))

    def recurrence(self, kept: dict[str, Word], rate: Word, initial: Word, resets: Word, last: Word) -> None:
        words = self._recurrence_words(kept, rate, initial, resets, last)
        self._pass("gated_recurrence", (*words, *[0] * 8))

    def recurrence_backward(self, kept, grads, rate, initial, resets, *, grad_states, log_decays, grad_rate) -> None:
        """`log_decays` is memory for as many numbers as there are states."""
        words = self._recurrence_words(kept, rate, initial, resets, 0)
        words += (grad_states, grads["last"], grads["state"])
        words += (*(grads[name] for name in ("recurrence_gate", "input_gate", "inputs")), log_decays, grad_rate)
        self._pass("gated_recurrence_backward", words)

    def _recurrence_words(self, kept, rate, initial, resets, last) -> tuple[Word, ...]:
        sizes = self._rows, self._state, self._steps
        gates = kept["recurrence_gate"], rate, kept["input_gate"], kept["inputs"]
        return (*sizes, *gates, initial, resets, kept["states"], last)

    def local(self, width: int) -> int:
        """In place of an address: memory of each thread for the rows of a tile."""
        found = -1 - self._local_bytes
        self._local_widths[found] = width
        self._local_bytes += aligned(_CHUNK * width * self._dtype.itemsize)
        return found

    def call(self) -> tuple[Call, int]:
        """The call, and the bytes of its workspace."""
        product = _PASSES["product"]
        products = [words for number, words in self._stages if number == product]
        others = [words for number, words in self._stages if number != product]
        at = _HEADER + 2 * len(self._stages) + 3
        starts = {product: at, None: at + _PRODUCT * len(products)}
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
            if isinstance(word, int) and word < 0:
                pointers += (place, self._local_widths[word] * item_size, -1 - word)
        words, panel_bytes = locals_at + len(pointers), aligned(self._panel_bytes)
        thread_bytes = aligned(8 * words + self._local_bytes)
        header = [
            self._threads, self._rows, max(self._steps, _CHUNK), self._descends, self._rounded,
            8 * (at - 3), 8 * locals_at, len(pointers) // 3, words,
            Pointer(self._workspace.base, self._workspace.offset + panel_bytes), thread_bytes, len(self._stages),
        ]  # fmt: skip
        return (_CHAINS[self._dtype], [*header, *body, *pointers]), panel_bytes + self._threads * thread_bytes
