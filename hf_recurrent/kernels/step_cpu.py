"""Programs of vector operations that a CPU runs in one call: one step of a recurrent network for few streams.

`step_cpu.c` is plain C, loaded with ctypes, which releases the interpreter's lock while it computes. Importing this
module raises ImportError where the kernel was not built, or was built from another version of its source.

Shape letters: B streams, S state width, K convolution taps.
"""

import ctypes
import struct
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .addresses import UnreadableTensor as UnreadableTensor
from .addresses import address, addresses
from .compiled import load_library

_VERSION = 1  # of the struct in step_cpu.c
_LINEAR, _NORM, _GELU, _MULTIPLY, _ADD, _GLRU, _RG_LRU, _CONVOLUTION = range(8)
_GATED_UNITS = {"glru": _GLRU, "rg_lru": _RG_LRU}
_TYPES = {torch.float32: 0, torch.float64: 1}
_COLUMNS = 11  # of an instruction: operation, width, depth, flag, six operands, a number
_FIRST_OPERAND = 4
_CACHE_LINE = 16  # numbers
_MOST_IDLE = 64  # calls kept for the next ones, by batch size
_READ_TOGETHER = 4  # STREAMS in step_cpu.c: rows for which the weights are read once

_library = load_library("_step_cpu", "hf_step_version", _VERSION)
_library.hf_step_run.argtypes = (ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
_library.hf_step_run.restype = None


def is_supported(dtype: torch.dtype) -> bool:
    """True for the types that the kernel computes in."""
    return dtype in _TYPES


class Vector(NamedTuple):
    """`width` numbers of each stream: the tensor `name` of a call, or scratch memory from `offset` on.

    With `is_new` it is the result that replaces this tensor, which stays as it is.
    """

    width: int
    name: str | None = None
    offset: int = 0
    is_new: bool = False


class StepProgram:
    """Operations on vectors of B streams, written once and run many times, by any number of threads at once.

    Weights are shared; each call has instructions and scratch memory of its own. Every operation returns its result,
    which may be overwritten once the next layer has begun.

    Args:
        dtype: of all tensors, one that [`is_supported`].
    """

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.instructions: list[int] = []
        self.widths: dict[str, int] = {}  # of the tensors, by name
        self.named: dict[tuple[str, bool], list[int]] = {}  # name and is_new → places in the instructions
        self.scratch: dict[int, int] = {}  # place → offset
        self.scratch_width = 0
        self._weights: list[Tensor] = []
        self._storages: list[torch.UntypedStorage] = []
        self._storage_bytes: list[int] = []
        self._used_scratch = 0
        self._idle: dict[int, deque[_Call]] = {}

    def begin_layer(self) -> None:
        """The results so far are no longer needed."""
        self._used_scratch = 0

    def linear(self, weight: Tensor, x: Vector, onto: Vector | None = None) -> Vector:
        """W x for a weight (width, depth); added to `onto` if it is given."""
        width, depth = weight.shape
        to = self._new(width) if onto is None else onto
        _check_widths((x, to), depth, width)
        return self._append(_LINEAR, to, weight, x, depth=depth, flag=onto is not None)

    def layer_norm(self, x: Vector, eps: float) -> Vector:
        """LayerNorm without parameters."""
        return self._append(_NORM, self._new(x.width), x, flag=True, number=eps)

    def rms_norm(self, x: Vector, weight: Tensor | None, eps: float, to: Vector | None = None) -> Vector:
        """RMSNorm, written to `to` if that is given; it may be `x`."""
        to = self._new(x.width) if to is None else to
        _check_widths((x, to), *[x.width if weight is None else _length(weight)] * 2)
        return self._append(_NORM, to, x, weight, number=eps)

    def gelu(self, x: Vector) -> Vector:
        """The exact GeLU."""
        return self._append(_GELU, self._new(x.width), x)

    def multiply(self, x: Vector, y: Vector) -> Vector:
        """x ∘ y."""
        _check_widths((y,), x.width)
        return self._append(_MULTIPLY, self._new(x.width), x, y)

    def add(self, onto: Vector, x: Vector) -> Vector:
        """onto + x, in place."""
        _check_widths((x,), onto.width)
        return self._append(_ADD, onto, onto, x)

    def gated_unit(self, name: str, to: Vector, *operands: Vector, rate: Tensor, scale, negative) -> Vector:
        """The element-wise step of `glru` or `rg_lru` from recurrence gate, input gate, projection and state."""
        _check_widths((to, *operands), *[_length(rate)] * 5)
        return self._append(_GATED_UNITS[name], to, *operands, rate, flag=negative, number=scale)

    def convolution(self, x: Vector, taps: Vector, weight: Tensor, new_taps: Vector) -> Vector:
        """Depthwise causal convolution with a weight (K, S), whose taps are (B, K-1, S), of width (K-1) S."""
        depth, width = weight.shape
        _check_widths((x, taps, new_taps), width, *[(depth - 1) * width] * 2)
        return self._append(_CONVOLUTION, self._new(width), x, taps, weight, new_taps, depth=depth)

    def run(self, tensors: dict[str, Tensor], batch_size: int) -> dict[str, Tensor]:
        """Run all operations on B streams.

        Args:
            tensors: contiguous, of the program's type, by the names used above.
            batch_size: B.

        Returns:
            The new tensors, by name.

        Raises:
            UnreadableTensor: a tensor is not what the operations need, or the memory of a weight was freed.
        """
        return self._run(batch_size, tensors, {})

    def run_chain(self, inputs: dict[str, Tensor], states: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
        """Run all operations on T successive steps of one stream, reading the weights once for several of them.

        An operation takes its rows in order, so row t can read the state that row t - 1 of the same operation wrote.
        The results are those of single steps, bit for bit.

        Args:
            inputs: of all steps, (T, …) each; overwritten where the program writes to them.
            states: before the first step, (1, …) each: the tensors that the program replaces.
            steps: T.

        Returns:
            The states (T + 1, …): those before the first step and after each, by name.

        Raises:
            UnreadableTensor: see `run`.
        """
        addresses(states, ((name, self.widths[name]) for name in states), self.dtype)
        # Two or three rows left over take longer than four.
        rest = steps % _READ_TOGETHER
        rows = steps if rest < 2 else steps + _READ_TOGETHER - rest
        padded = inputs
        if rows > steps:
            padded = {name: tensor.new_zeros(rows, *tensor.shape[1:]) for name, tensor in inputs.items()}
            for name, tensor in inputs.items():
                padded[name][:steps] = tensor
        track = {name: state.new_empty(rows + 1, *state.shape[1:]) for name, state in states.items()}
        for name, state in states.items():
            track[name][:1] = state
        before = {name: tensor[:-1] for name, tensor in track.items()}
        self._run(rows, {**padded, **before}, {name: tensor[1:] for name, tensor in track.items()})
        if rows > steps:
            for name, tensor in inputs.items():
                tensor.copy_(padded[name][:steps])
        return {name: tensor[: steps + 1] for name, tensor in track.items()}

    def _run(self, batch_size: int, tensors: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
        idle = self._idle.get(batch_size) or self._idle.setdefault(batch_size, deque(maxlen=_MOST_IDLE))
        try:
            call = idle.pop()
        except IndexError:
            call = _Call(self, batch_size)
        if [*map(torch.UntypedStorage.nbytes, self._storages)] != self._storage_bytes:
            raise UnreadableTensor("The memory of a weight was freed or resized.")
        results = call.run(tensors, new)
        idle.append(call)
        return results

    def _new(self, width: int) -> Vector:
        offset = self._used_scratch
        self._used_scratch += -(-width // _CACHE_LINE) * _CACHE_LINE
        self.scratch_width = max(self.scratch_width, self._used_scratch)
        return Vector(width, offset=offset)

    def _append(
        self, operation: int, to: Vector, *operands: Vector | Tensor | None, depth=0, flag=False, number=0.0
    ) -> Vector:
        self.instructions += (operation, to.width, depth, int(flag))
        for operand in (to, *operands, *[None] * (_COLUMNS - _FIRST_OPERAND - 2 - len(operands))):
            place, pointer = len(self.instructions), 0
            if isinstance(operand, Tensor):
                pointer = self._keep(operand)
            elif operand is not None and operand.name is not None:
                self._name(operand, place)
            elif operand is not None:
                self.scratch[place] = operand.offset
            self.instructions.append(pointer)
        self.instructions += struct.unpack("=q", struct.pack("=d", number))
        return to

    def _keep(self, weight: Tensor) -> int:
        pointer = address("weight", weight, self.dtype, weight.numel())
        self._weights.append(weight)
        self._storages.append(weight.untyped_storage())
        self._storage_bytes.append(self._storages[-1].nbytes())
        return pointer

    def _name(self, vector: Vector, place: int) -> None:
        self.named.setdefault((vector.name, vector.is_new), []).append(place)
        before = self.widths.setdefault(vector.name, vector.width)
        if before != vector.width:
            raise ValueError(f"the vector `{vector.name}` has width {vector.width}; it had width {before} before")


class _Call:
    """The instructions with scratch memory of their own; one caller at a time."""

    def __init__(self, program: StepProgram, batch_size: int):
        self.scratch = torch.empty(batch_size * program.scratch_width, dtype=program.dtype, device="cpu")
        self.instructions = np.array(program.instructions, dtype=np.int64)
        stream_bytes = batch_size * program.dtype.itemsize
        for place, offset in program.scratch.items():
            self.instructions[place] = self.scratch.data_ptr() + offset * stream_bytes
        self.dtype = program.dtype
        self.sizes = tuple((name, batch_size * width) for name, width in program.widths.items())
        self.new = tuple(name for name in program.widths if (name, True) in program.named)
        order = [(name, False) for name in program.widths] + [(name, True) for name in self.new]
        self.places = np.concatenate([np.array(places) for places in program.named.values()])
        self.numbers = np.concatenate([[order.index(key)] * len(places) for key, places in program.named.items()])
        count = len(program.instructions) // _COLUMNS
        self.arguments = (_TYPES[program.dtype], batch_size, count, self.instructions.ctypes.data)

    def run(self, tensors: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
        """`new` is memory for the results; it may overlap with `tensors` as in `run_chain`. Empty for fresh memory."""
        pointers = addresses(tensors, self.sizes, self.dtype)
        new = {name: new[name] if new else torch.empty_like(tensors[name]) for name in self.new}
        pointers += map(Tensor.data_ptr, new.values())
        self.instructions[self.places] = np.array(pointers)[self.numbers]
        _library.hf_step_run(*self.arguments)
        return new


def _check_widths(vectors: tuple[Vector, ...], *expected: int) -> None:
    widths = tuple(vector.width for vector in vectors)
    if widths != expected:
        raise ValueError(f"the vectors of an operation have widths {widths}; they must be {expected}")


def _length(weight: Tensor) -> int:
    if weight.dim() != 1:
        raise ValueError(f"the weight of an operation has shape {tuple(weight.shape)}; it must have one dimension")
    return len(weight)
