"""A list of vector operations that a CPU runs in one call: one step of a recurrent network for few streams.

`step_cpu.c` is plain C, loaded with ctypes, which lets go of the interpreter's lock while it computes. Importing this
module raises ImportError where the kernel was not built, or was built from another version of its source.

Shape letters: B streams, M model width, S state width, K convolution taps.
"""

import ctypes
import struct

import numpy as np
import torch
from torch import Tensor

from .compiled import load_library

_VERSION = 1  # of the struct in step_cpu.c
_LINEAR, _NORM, _GELU, _MULTIPLY, _ADD, _GLRU, _RG_LRU, _CONVOLUTION = range(8)
_TYPES = {torch.float32: 0, torch.float64: 1}
_COLUMNS = 11  # of an instruction: operation, width, depth, flag, six operands, a number
_FIRST_OPERAND = 4


def _load() -> ctypes.CDLL:
    library = load_library("_step_cpu", "hf_step_version", _VERSION)
    library.hf_step_run.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    library.hf_step_run.restype = None
    return library


_library = _load()

# What an operation works on: a tensor that stays where it is, or the name of one that every run brings along.
Operand = Tensor | str


class StepProgram:
    """Operations on vectors of B streams, (B, width), written once and run many times.

    Every operation returns its result, a buffer of the program that may be overwritten once the next layer has begun.

    Args:
        dtype: float32 or float64, of all tensors.
        batch_size: B.

    Raises:
        ValueError: the kernel has no version for the type.
    """

    def __init__(self, dtype: torch.dtype, batch_size: int):
        if dtype not in _TYPES:
            raise ValueError(f"`dtype` is {dtype}; the kernel has versions for {', '.join(map(str, _TYPES))}.")
        self.dtype, self.batch_size = dtype, batch_size
        self._rows: list[list[int]] = []
        self._kept: list[Tensor] = []
        self._places: dict[str, list[int]] = {}
        self._widths: dict[str, int] = {}
        self._buffers: list[Tensor] = []
        self._used_buffers = 0
        self._list: np.ndarray | None = None

    def begin_layer(self) -> None:
        """The results so far are no longer needed."""
        self._used_buffers = 0

    def linear(self, weight: Tensor, x: Operand, onto: Operand | None = None) -> Operand:
        """W x for a weight (width, depth); added to `onto` if it is given."""
        width, depth = weight.shape
        to = self._buffer(width) if onto is None else onto
        return self._append(_LINEAR, width, to, weight, x, depth=depth, flag=onto is not None)

    def layer_norm(self, x: Operand, eps: float) -> Operand:
        """LayerNorm without parameters."""
        width = self._width(x)
        return self._append(_NORM, width, self._buffer(width), x, flag=True, number=eps)

    def rms_norm(self, x: Operand, width: int, weight: Tensor | None, eps: float, to: Operand | None = None):
        """RMSNorm, written to `to` if that is given; it may be `x`."""
        return self._append(_NORM, width, self._buffer(width) if to is None else to, x, weight, number=eps)

    def gelu(self, x: Operand) -> Operand:
        """The exact GeLU."""
        width = self._width(x)
        return self._append(_GELU, width, self._buffer(width), x)

    def multiply(self, x: Operand, y: Operand) -> Operand:
        """x ∘ y."""
        width = self._width(x)
        return self._append(_MULTIPLY, width, self._buffer(width), x, y)

    def add(self, onto: Operand, x: Tensor) -> Operand:
        """onto + x, in place."""
        return self._append(_ADD, self._width(x), onto, onto, x)

    def glru(self, to: str, recurrence_gate, input_gate, projection, state: str, nu: Tensor, scale, negative) -> str:
        """The element-wise step of [`GLRU`] from its projections (B, S)."""
        operands = (to, recurrence_gate, input_gate, projection, state, nu)
        self._widths[to] = nu.shape[0]
        return self._append(_GLRU, nu.shape[0], *operands, flag=negative, number=scale)

    def rg_lru(self, to: str, recurrence_gate, input_gate, x, state: str, rate: Tensor, scale, negative) -> str:
        """The element-wise step of [`RGLRU`] from its gates and input (B, S)."""
        operands = (to, recurrence_gate, input_gate, x, state, rate)
        self._widths[to] = rate.shape[0]
        return self._append(_RG_LRU, rate.shape[0], *operands, flag=negative, number=scale)

    def convolution(self, x: Operand, taps: str, weight: Tensor, new_taps: str) -> Operand:
        """Depthwise causal convolution with a weight (K, S), whose taps are (B, K-1, S)."""
        depth, width = weight.shape
        return self._append(_CONVOLUTION, width, self._buffer(width), x, taps, weight, new_taps, depth=depth)

    def run(self, tensors: dict[str, Tensor]) -> None:
        """Run all operations on these tensors, contiguous and of the program's type, by the names used above."""
        if self._list is None:
            self._list = np.array(self._rows, dtype=np.int64)
            self._flat = self._list.reshape(-1)
            self._indices = np.concatenate([np.array(places) for places in self._places.values()])
            self._repeats = [len(places) for places in self._places.values()]
        addresses = [tensors[name].data_ptr() for name in self._places]
        self._flat[self._indices] = np.repeat(addresses, self._repeats)
        _library.hf_step_run(_TYPES[self.dtype], self.batch_size, len(self._rows), self._list.ctypes.data)

    def _width(self, operand: Operand) -> int:
        return self._widths[operand] if isinstance(operand, str) else operand.shape[-1]

    def _buffer(self, width: int) -> Tensor:
        number = self._used_buffers
        self._used_buffers += 1
        shape = (self.batch_size, width)
        if number == len(self._buffers):
            self._buffers.append(torch.empty(shape, dtype=self.dtype, device="cpu"))
        elif self._buffers[number].shape != shape:
            self._kept.append(self._buffers[number])
            self._buffers[number] = torch.empty(shape, dtype=self.dtype, device="cpu")
        return self._buffers[number]

    def _append(
        self, operation: int, width: int, *operands: Operand | None, depth=0, flag=False, number=0.0
    ) -> Operand:
        begin = len(self._rows) * _COLUMNS + _FIRST_OPERAND
        row = [operation, width, depth, int(flag)]
        for column in range(_COLUMNS - 1 - _FIRST_OPERAND):
            operand = operands[column] if column < len(operands) else None
            if isinstance(operand, str):
                self._places.setdefault(operand, []).append(begin + column)
                operand = None
            elif operand is not None:
                self._kept.append(operand)
            row.append(0 if operand is None else operand.data_ptr())
        row.append(*struct.unpack("=q", struct.pack("=d", number)))
        self._rows.append(row)
        return operands[0]
