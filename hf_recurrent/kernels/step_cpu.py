"""Programs of vector operations that a CPU runs in one call: one step of a recurrent network.

`step_cpu.c` is plain C, loaded with ctypes, which releases the interpreter's lock while it computes. Importing this
module raises ImportError where the kernel was not built, or was built from another version of its source.

Shape letters: B streams, T steps.
"""

import ctypes
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from .addresses import UnreadableTensor as UnreadableTensor
from .addresses import address, addresses
from .bytecode import Bytecode
from .compiled import load_library
from .step_graph import StepGraph, UnsupportedOp, Value

_VERSION = 8  # VERSION in bytecode.h
_TYPES = {torch.float32: 0, torch.float64: 1}
_VERSION_OF = attrgetter("_version")
_MOST_IDLE = 64  # calls kept for the next ones, by batch size
_MOST_SIZES = 32  # batch sizes for which calls are kept

_library = load_library("_step_cpu", "hf_step_version", _VERSION)
_POINTER = ctypes.c_void_p
_library.hf_step_run.argtypes = (*[ctypes.c_int64] * 3, _POINTER, _POINTER, ctypes.c_int64, _POINTER)
_library.hf_step_run.restype = ctypes.c_int64
_library.hf_step_norm.argtypes = (ctypes.c_int64, _POINTER, ctypes.c_int64)
_library.hf_step_norm.restype = ctypes.c_double
_library.hf_step_update.argtypes = (ctypes.c_int64, _POINTER, _POINTER, ctypes.c_int64)
_library.hf_step_update.restype = None
_library.hf_step_learn.argtypes = (
    *(ctypes.c_int64, _POINTER, _POINTER, ctypes.c_int64),
    *[_POINTER] * 4,
    ctypes.c_int64,
)
_library.hf_step_learn.restype = ctypes.c_int64


class WeightsChanged(Exception):
    """A weight from which the program was computed holds other values now."""


def is_supported(dtype: torch.dtype) -> bool:
    """True for the types that the kernel computes in."""
    return dtype in _TYPES


class Program:
    """Bytecode as the kernel reads it."""

    def __init__(self, dtype: torch.dtype, bytecode: Bytecode):
        self.dtype, self.inputs, self.outputs = dtype, bytecode.inputs, bytecode.outputs
        self._scratch_width, self._constants = bytecode.scratch_width, bytecode.constants
        self._code = np.array(bytecode.code, dtype=np.int64)
        self._segments = np.array(bytecode.segments, dtype=np.int64)
        self._constant_pointers = [
            address("weight", t.detach(), t.dtype, t.numel(), strided=True) for t in bytecode.constants
        ]


class Call:
    """Scratch memory of B streams, and the addresses that a run of a program reads."""

    def __init__(self, program: Program, batch_size: int):
        self.scratch = torch.empty(batch_size * program._scratch_width, dtype=program.dtype, device="cpu")
        unset = [0] * (len(program.inputs) + len(program.outputs))
        self.bases = np.array([self.scratch.data_ptr(), *unset, *program._constant_pointers], dtype=np.int64)
        self._first = _TYPES[program.dtype], batch_size
        code, segments = program._code, program._segments
        self.pointers = code.ctypes.data, segments.ctypes.data, len(segments), self.bases.ctypes.data

    def run(self, is_chain: bool = False) -> int:
        """Returns one of `enum outcome`."""
        return _library.hf_step_run(*self._first, is_chain, *self.pointers)


class StepProgram(Program):
    """A graph of one step, compiled once and run many times, by any number of threads at once.

    Weights are shared; each call has scratch memory of its own. A stream's results have the same bits in a batch of
    any size, and in a chain.

    Args:
        graph: of the step.
        outputs: name → value; those with the name of an input replace it.
        guards: weights, and copies of their values.
        weights: "int8" or "bfloat16" to store weights so; float32 only.
        owner: a weight as the graph has it → the tensor whose version counts changes in place.

    Raises:
        UnsupportedOp: a single step cannot run a node.
        UnreadableTensor: a weight is not in memory.
    """

    def __init__(
        self,
        graph: StepGraph,
        outputs: dict[str, Value],
        guards: list[tuple[Tensor, Tensor]],
        weights: str | None = None,
        owner: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ):
        if weights is not None and graph.dtype is not torch.float32:
            raise UnsupportedOp(f"weights of type {weights} in a model of type {graph.dtype}")
        bytecode = Bytecode(graph, outputs, guards, weights)
        super().__init__(graph.dtype, bytecode)
        storages = [tensor.untyped_storage() for tensor in bytecode.constants]
        self._storages = [*{storage.data_ptr(): storage for storage in storages}.values()]
        self._memory = self._memory_of_weights()
        self._converted = [owner(weight) for weight in bytecode.converted]
        self._versions = [*map(_VERSION_OF, self._converted)]
        self._idle: dict[int, deque[_StepCall]] = {}

    def run(self, tensors: dict[str, Tensor], batch_size: int) -> dict[str, Tensor]:
        """Run all operations on B streams.

        Args:
            tensors: the inputs, contiguous, of the program's type; token ids int64.
            batch_size: B.

        Returns:
            The outputs (B, width), or of the shape of the input that they replace.

        Raises:
            UnreadableTensor: a tensor is not what the operations need, or the memory of a weight was freed.
            WeightsChanged: the program must be recompiled.
        """
        new = {
            name: torch.empty_like(tensors[name])
            if name in tensors
            else torch.empty(batch_size, width, dtype=self.dtype, device="cpu")
            for name, width in self.outputs.items()
        }
        self._run(tensors, new, batch_size, False)
        return new

    def run_chain(
        self, inputs: dict[str, Tensor], states: dict[str, Tensor], steps: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run all operations on T successive steps of one stream, reading most weights once for several of them.

        Row t of a state is the memory that row t - 1 wrote; operations between the reading and the writing of a state
        go row by row. The results equal single steps, bit for bit.

        Args:
            inputs: of all steps, (T, …) each.
            states: before the first step, (1, …) each: the tensors that the program replaces.
            steps: T.

        Returns:
            The other outputs (T, …), and the states (T + 1, …): before the first step and after each, by name.

        Raises:
            UnreadableTensor, WeightsChanged: see `run`.
        """
        addresses(states, ((name, self.outputs[name]) for name in states), self.dtype)
        track = {name: state.new_empty(steps + 1, *state.shape[1:]) for name, state in states.items()}
        for name, state in states.items():
            track[name][:1] = state
        before = {name: tensor[:-1] for name, tensor in track.items()}
        new = {name: tensor[1:] for name, tensor in track.items()}
        others = {
            name: torch.empty(steps, width, dtype=self.dtype, device="cpu")
            for name, width in self.outputs.items()
            if name not in states
        }
        self._run({**inputs, **before}, {**new, **others}, steps, True)
        return others, track

    def _memory_of_weights(self) -> tuple[list[int], list[int]]:
        sizes = [*map(torch.UntypedStorage.nbytes, self._storages)]
        # One that was freed and filled again has the same size, elsewhere.
        return sizes, [*map(torch.UntypedStorage.data_ptr, self._storages)]

    def _run(self, tensors: dict[str, Tensor], new: dict[str, Tensor], batch_size: int, is_chain: bool) -> None:
        if self._memory_of_weights() != self._memory:
            raise UnreadableTensor("The memory of a weight was freed, resized or moved.")
        if self._converted and [*map(_VERSION_OF, self._converted)] != self._versions:
            raise WeightsChanged
        idle = self._idle.get(batch_size)
        if idle is None:
            if len(self._idle) >= _MOST_SIZES:
                self._idle = {}
            idle = self._idle.setdefault(batch_size, deque(maxlen=_MOST_IDLE))
        try:
            call = idle.pop()
        except IndexError:
            call = _StepCall(self, batch_size)
        call.bind(self, tensors, new)
        changed = call.run(is_chain)
        idle.append(call)
        if changed:
            raise WeightsChanged


class _StepCall(Call):
    """One call at a time."""

    def __init__(self, program: StepProgram, batch_size: int):
        super().__init__(program, batch_size)
        sizes = [(name, batch_size * width) for name, width in program.inputs.items()]
        self.ids = [size for size in sizes if size[0] == "ids"]
        self.sizes = [size for size in sizes if size[0] != "ids"]
        self.pack = Struct(f"={len(program.inputs) + len(program.outputs)}q").pack_into

    def bind(self, program: StepProgram, tensors: dict[str, Tensor], new: dict[str, Tensor]) -> None:
        """Write the addresses of inputs and outputs."""
        pointers = addresses(tensors, self.sizes, program.dtype)
        if self.ids:  # they are the first input
            pointers = [*addresses(tensors, self.ids, torch.int64), *pointers]
        pointers += [new[name].data_ptr() for name in program.outputs]
        self.pack(self.bases, self.bases.itemsize, *pointers)
