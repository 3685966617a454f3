"""Learning from blocks of one stream on a CPU in a few calls: gradients of a block, and the update of the weights.

The kernel is `step_cpu.c`, loaded with ctypes, which releases the interpreter's lock while it computes. Importing this
module raises ImportError where it was not built, or was built from another version of its source.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .addresses import UnreadableTensor as UnreadableTensor
from .addresses import address, addresses, check_lookups
from .bytecode import Bytecode
from .step_cpu import _TYPES, Call, Program, _library
from .step_cpu import WeightsChanged as WeightsChanged
from .step_cpu import is_supported as is_supported
from .step_graph import StepGraph, Value
from .step_graph import UnsupportedOp as UnsupportedOp

_DONE, _CHANGED, _NOT_FINITE, _GRADIENT_NOT_FINITE = range(4)  # enum outcome
_PARAMETER = np.dtype(
    [(name, "i8") for name in ("weights", "first", "second", "gradient", "count", "rows", "columns", "width")]
    + [("rate", "f8")]
)
_UPDATE = np.dtype([("kind", "i8")] + [(n, "f8") for n in ("scale", "beta1", "beta2", "eps", "bias1", "bias2")])
_BLOCKS = np.dtype(
    [(name, "i8") for name in ("count", "moving", "swapped", "tables", "moves", "swaps", "corrections")]
    + [(name, "i8") for name in ("trained_tables", "rows", "steps", "lookups", "step_count")]
    + [("most_norm", "f8"), ("norm", "f8"), ("done", "i8")]
)
_TABLE = np.dtype(
    [(name, "i8") for name in ("table", "row_sums", "width", "gradient")] + [("rate", "f8"), ("eps", "f8")]
)
KINDS = ("adamw", "rmsprop")


class BlockProgram(Program):
    """A graph of one block of one stream, compiled once and run many times, by one thread at a time.

    Args:
        graph: of the block.
        outputs: name → value.
        guards: weights that the graph has copies of, and these.
        effects: values of nodes that run for their side effects.

    Raises:
        UnsupportedOp: the kernel cannot run a node.
        UnreadableTensor: a weight is not in memory.
    """

    def __init__(self, graph: StepGraph, outputs: dict[str, Value], guards: list, effects: list[Value]):
        super().__init__(graph.dtype, Bytecode(graph, outputs, guards, effects=[value.buffer for value in effects]))
        self._inputs, self._outputs = ([_Slot(*one) for one in part.items()] for part in (self.inputs, self.outputs))
        self._call = Call(self, batch_size=1)

    def run(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> bool:
        """Run all operations.

        Args:
            inputs: contiguous, of the program's type; some are changed.
            outputs: their memory.

        Returns:
            False where a value that must be finite is not; nothing was changed but outputs.

        Raises:
            UnreadableTensor: a tensor is not what the operations need.
            WeightsChanged: the program must be recompiled; nothing was changed but outputs.
        """
        self._bind(inputs, self._inputs, 1)
        self._bind(outputs, self._outputs, 1 + len(self._inputs))
        outcome = self._call.run()
        if outcome == _CHANGED:
            raise WeightsChanged
        return outcome != _NOT_FINITE

    def bound_call(self, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> Call:
        """A call for these tensors, which must stay where they are; its `run` gives 0 if all went well."""
        call = Call(self, batch_size=1)
        pointers = addresses(inputs, self.inputs.items(), self.dtype)
        pointers += addresses(outputs, self.outputs.items(), self.dtype)
        call.bases[1 : 1 + len(pointers)] = pointers
        return call

    def _bind(self, tensors: dict[str, Tensor], slots: list["_Slot"], first: int) -> None:
        """Write the addresses of tensors; one that was given before, and is where it was, is not checked again."""
        for number, slot in enumerate(slots, first):
            tensor = tensors[slot.name]
            if tensor is slot.tensor and tensor.data_ptr() == slot.pointer:
                continue
            (slot.pointer,) = addresses(tensors, [(slot.name, slot.size)], self.dtype)
            slot.tensor = tensor
            self._call.bases[number] = slot.pointer


@dataclass
class _Slot:
    """An input or output, and the tensor that was its memory the last time."""

    name: str
    size: int
    tensor: Tensor | None = None
    pointer: int = 0


class Trained(NamedTuple):
    """A parameter that an optimizer changes.

    Args:
        weights: its elements.
        first, second: its moments; RMSProp has no first one.
        learning_rate: of this parameter.
        factors: memory of vectors whose outer product can be its gradient.
    """

    weights: Tensor
    first: Tensor | None
    second: Tensor
    learning_rate: float
    factors: tuple[Tensor, Tensor] | None = None


class WeightUpdate:
    """The step of an optimizer without weight decay for all parameters, whose gradients are in one tensor.

    Args:
        kind: "adamw" or "rmsprop".
        gradient: of all parameters, one after another.
        parameters: in that order, contiguous.
        betas: of AdamW; the second one is the α of RMSProp.
        eps: of either.
    """

    def __init__(
        self,
        kind: str,
        gradient: Tensor,
        parameters: Sequence[Trained],
        betas: tuple[float, float],
        eps: float,
    ):
        self._gradient, self._parameters, self._betas = gradient, parameters, betas
        self._is_double = int(gradient.dtype is torch.float64)
        total = sum(one.weights.numel() for one in parameters)
        self._address = address("gradient", gradient, gradient.dtype, total)
        rows, at = [], self._address
        for one in parameters:
            size = one.weights.numel()
            tensors = {"weights": one.weights.detach(), "first": one.first, "second": one.second}
            pointers = [
                0 if tensor is None else address(name, tensor, gradient.dtype, size)
                for name, tensor in tensors.items()
            ]
            rows.append((*pointers, at, size, *self._factors(one), one.learning_rate))
            at += size * gradient.itemsize
        self._factored = np.array(rows, dtype=_PARAMETER)
        self._whole = self._factored.copy()
        self._whole["rows"] = 0
        self._pointers = self._whole.ctypes.data, self._factored.ctypes.data
        self._update = np.array([(KINDS.index(kind), 1.0, *betas, eps, 1.0, 1.0)], dtype=_UPDATE)
        self._update_pointer = self._update.ctypes.data

    def _factors(self, one: Trained) -> tuple[int, int, int]:
        """Addresses of the factors of a gradient, and the elements of the second one."""
        if one.factors is None:
            return 0, 0, 0
        height, width = one.weights.shape
        first, second = (
            address("factor", factor, self._gradient.dtype, size)
            for factor, size in zip(one.factors, (height, width), strict=True)
        )
        return first, second, width

    def norm(self, factored: bool = False) -> float:
        """The norm of the gradient.

        Args:
            factored: gradients of parameters that have factors are the outer products of these.
        """
        return _library.hf_step_norm(self._is_double, self._pointers[factored], len(self._parameters))

    def step(self, number: int, scale: float, factored: bool = False) -> None:
        """Change the weights.

        Args:
            number: of this step, from 1.
            scale: factor of the gradient.
            factored: as in `norm`.
        """
        self._update["scale"] = scale
        self._update["bias1"], self._update["bias2"] = self.corrections(number)
        _library.hf_step_update(self._is_double, *self.arguments(factored))

    def corrections(self, number: int) -> tuple[float, ...]:
        """Divisors of the moments in this step."""
        return tuple(1 - beta**number for beta in self._betas)

    def arguments(self, factored: bool) -> tuple[int, int, int]:
        """Addresses for the kernel, and the number of parameters."""
        return self._update_pointer, self._pointers[factored], len(self._parameters)


class TrainedTable(NamedTuple):
    """A table of which a block reads few rows, changed by row-wise Adagrad.

    Args:
        weights: (rows, M).
        row_sums: (rows,).
        gradient: (T, M), an output of the program, of the sums of the rows that each step reads.
        rate, eps: of its optimizer.
    """

    weights: Tensor
    row_sums: Tensor
    gradient: Tensor
    rate: float
    eps: float


class LoopEnd(NamedTuple):
    """Where a [`BlockLoop`] ended.

    Args:
        done: blocks with their updates.
        is_finite: False where a value of the next block is not finite that must be: nothing has changed.
        norm: of the next block's gradient where it is NaN or infinite: sensitivities have changed, weights have not.
    """

    done: int
    is_finite: bool = True
    norm: float | None = None


class BlockLoop:
    """Blocks of one stream, each with an update of the weights by its gradient, in one call.

    Args:
        program: of a block.
        moving: names of inputs and outputs that hold the elements of all blocks, one after another.
        states: names of outputs that are the next block's inputs.
    """

    def __init__(self, program: BlockProgram, moving: Sequence[str], states: Sequence[str]):
        self._program, self._moving, self._call = program, {*moving}, Call(program, batch_size=1)
        inputs = {name: number for number, name in enumerate(program.inputs, 1)}
        outputs = {name: number for number, name in enumerate(program.outputs, 1 + len(inputs))}
        moves = [
            (number, size * program.dtype.itemsize)
            for numbers, sizes in ((inputs, program.inputs), (outputs, program.outputs))
            for (name, number), size in zip(numbers.items(), sizes.values(), strict=True)
            if name in self._moving
        ]
        self.swapped = [name for name in states if name in inputs]
        swaps = [(inputs[name], outputs[name]) for name in self.swapped]
        self._moves, self._swaps = (np.array(pairs, np.int64).reshape(-1, 2) for pairs in (moves, swaps))

    def run(
        self,
        inputs: dict[str, Tensor],
        outputs: dict[str, Tensor],
        count: int,
        update: WeightUpdate,
        first: int,
        most_norm: float,
        *,
        factored: bool,
        tables: Sequence[TrainedTable] = (),
        lookups: Tensor | None = None,
    ) -> LoopEnd:
        """Read `count` blocks.

        After an odd number of blocks, the last state is in the outputs, after an even number in the inputs if it is
        one of `swapped`.

        Args:
            inputs, outputs: as in [`BlockProgram.run`].
            update: of the weights.
            first: number of its first step, from 1.
            most_norm: norm to which gradients are clipped.
            factored: as in [`WeightUpdate.norm`].
            tables: that are trained.
            lookups: (count, T, orders) int64, numbers of the rows that the steps read from each of them.

        Raises:
            IndexError: a table has no such row.
            UnreadableTensor: a tensor is not what the operations need.
            WeightsChanged: the program must be recompiled; nothing was changed but outputs.
        """
        program, pointers = self._program, []
        for tensors, sizes in ((inputs, program.inputs), (outputs, program.outputs)):
            whole = [(name, size * count if name in self._moving else size) for name, size in sizes.items()]
            pointers += addresses(tensors, whole, program.dtype)
        self._call.bases[1 : 1 + len(pointers)] = pointers
        corrections = np.array([update.corrections(number) for number in range(first, first + count)])
        trained, rows, steps = self._tables(tables, lookups)
        arrays = [array.ctypes.data for array in (self._moves, self._swaps, corrections, trained, rows, steps)]
        sizes = count, len(self._moves), len(self._swaps), len(tables)
        of_block = (rows.size // count, len(tables[0].gradient)) if tables else (0, 0)
        blocks = np.array([(*sizes, *arrays, *of_block, most_norm, 0.0, 0)], dtype=_BLOCKS)
        outcome = _library.hf_step_learn(
            _TYPES[program.dtype], *self._call.pointers, blocks.ctypes.data, *update.arguments(factored)
        )
        if outcome == _CHANGED:  # by someone else, before this call
            raise WeightsChanged
        norm = float(blocks["norm"][0]) if outcome == _GRADIENT_NOT_FINITE else None
        return LoopEnd(int(blocks["done"][0]), outcome != _NOT_FINITE, norm)

    def _tables(self, tables: Sequence[TrainedTable], lookups: Tensor | None) -> tuple[np.ndarray, ...]:
        """The tables; for each block the rows that it reads, ascending; and the steps that read them."""
        if not tables:
            return (np.empty(0, np.int64),) * 3
        check_lookups(lookups, min(len(table.weights) for table in tables))
        rows, places = lookups.flatten(1).sort(stable=True)
        trained = [
            (
                address("weights", one.weights.detach(), self._program.dtype, one.weights.numel()),
                address("row_sums", one.row_sums, self._program.dtype, len(one.weights)),
                one.weights.shape[1],
                address("gradient", one.gradient, self._program.dtype, one.gradient.numel()),
                *(one.rate, one.eps),
            )
            for one in tables
        ]
        return np.array(trained, dtype=_TABLE), rows.numpy(), (places // lookups.shape[-1]).numpy()
