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
from .addresses import address, addresses
from .bytecode import Bytecode
from .step_cpu import Call, Program, _library
from .step_cpu import WeightsChanged as WeightsChanged
from .step_cpu import is_supported as is_supported
from .step_graph import StepGraph, Value
from .step_graph import UnsupportedOp as UnsupportedOp

_DONE, _CHANGED, _NOT_FINITE = range(3)  # enum outcome
_PARAMETER = np.dtype(
    [(name, "i8") for name in ("weights", "first", "second", "gradient", "count", "rows", "columns", "width")]
    + [("rate", "f8")]
)
_UPDATE = np.dtype([("kind", "i8")] + [(n, "f8") for n in ("scale", "beta1", "beta2", "eps", "bias1", "bias2")])
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
        self._update["bias1"], self._update["bias2"] = (1 - beta**number for beta in self._betas)
        count = len(self._parameters)
        _library.hf_step_update(self._is_double, self._update_pointer, self._pointers[factored], count)
