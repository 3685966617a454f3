"""Recording of the forward and backward pass of one block of one stream, as the graph of a program.

Everything that runs below autograd is seen here, whatever the model and the learning rule. Weights are read where they
are, and nothing that was computed from them is kept.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .block_lowering import BlockLowering
from .lowering import aten
from .step_graph import ComplexValue, UnsupportedOp, Value
from .step_trace import StepTrace


class BlockTrace(StepTrace):
    """Runs inside `with`; then `graph` holds the block.

    Args:
        dtype: of the block's elements.
        inputs: name → tensor.
        weights: tensors that are read where they are.
    """

    lowering_class = BlockLowering

    def __init__(self, dtype: torch.dtype, inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor]):
        super().__init__(dtype, inputs)
        self.effects: list[Value] = []
        self._new: dict[int, Tensor] = {}  # not written yet
        for weight in weights.values():
            memory = weight.detach()
            if not memory.is_contiguous() or memory.dtype != dtype:
                raise UnsupportedOp(f"a weight of type {memory.dtype}, or one that is not contiguous")
            self._remember(weight, Value(weight.shape, self.graph.constant(memory)))

    def value_of(self, tensor: Tensor) -> Value:
        """The value of a tensor, which must be a real one."""
        value = self.value(tensor)
        if isinstance(value, ComplexValue):
            raise UnsupportedOp("a complex result")
        return value

    def require_finite(self, number: Tensor) -> None:
        """The program stops here if the number is not finite."""
        self.effects.append(self.graph.add("finite", (1,), [self.value_of(number)]))

    def advance_sensitivities(
        self, carried: Tensor, transition: Tensor, derivative: Any, grad_state: Tensor | None, gradient: Tensor | None
    ) -> None:
        """In place of the function of that name in the learning rules."""
        _, channels, rows, groups, *columns = carried.shape
        of_rows, inputs = derivative
        operands = [None if x is None else self.value_of(x) for x in (carried, transition, of_rows, inputs)]
        operands += [None, None] if gradient is None else [self.value_of(grad_state), self.value_of(gradient)]
        operands += [None, None]  # the factors of a gradient, see outer_products.py
        fields = {"steps": 1 if inputs is None else of_rows.shape[1], "channels": channels, "rows": rows}
        fields |= {"groups": groups, "columns": columns[0] if columns else 1}
        value = self.graph.add("sensitivities", (1,) if gradient is None else gradient.shape, operands, **fields)
        self.effects.append(value)
        if gradient is not None:
            self._remember(gradient, value)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        # A gradient that autograd does not own is copied into the memory of a new one.
        if function is aten.new_empty_strided.default:
            new = function(*arguments, **(options or {}))
            self._new[id(new)] = new
            return new
        if function is aten.copy_.default and id(arguments[0]) in self._new and self._is_dynamic(arguments[1]):
            new, source = arguments[:2]
            function(new, source)
            del self._new[id(new)]
            self._remember(new, self._known(source))
            return new
        return super().__torch_dispatch__(function, types, arguments, options)
