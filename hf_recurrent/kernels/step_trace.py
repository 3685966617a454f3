"""Recording of one step of `forward`, operator by operator, as a graph.

The step runs once, with values and one stream, under a dispatch mode: that costs as much as the step, where
`torch.export` takes seconds, and sees what `torch.export` sees: plain operators below modules and autograd. Tensors
that depend on the step's inputs become values of the graph; all others are constants.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import block_operators, operators  # noqa: F401 (they fill the table)
from .lowering import MOVES, OPERATORS, Lowering, aten
from .step_graph import ComplexValue, StepGraph, UnsupportedOp, Value

# Constants of the shape or type of a tensor, whatever that holds.
_FACTORIES = {
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.zeros_like.default,
    aten.ones_like.default, aten.full_like.default,
}  # fmt: skip
_PASSED = {aten.promote_types.default, aten._assert_tensor_metadata.default, aten.sym_size.int}


class StepTrace(TorchDispatchMode):
    """Runs inside `with`; then `graph` holds the step.

    Args:
        dtype: of the step's elements.
        inputs: name → tensor of one stream; token ids have the name "ids".
    """

    lowering_class = Lowering

    def __init__(self, dtype: torch.dtype, inputs: Mapping[str, Tensor]):
        super().__init__()
        self.lowering = self.lowering_class(dtype, self._fold, self.is_weight)
        self.graph: StepGraph = self.lowering.graph
        # Tensors are identified by id(), so all are kept alive.
        self._kept: list[Tensor] = []
        self._values: dict[int, Any] = {}
        self._sources: dict[int, frozenset[int]] = {}  # of a constant: the weights that it was computed from
        self._memory: dict[int, list[Tensor]] = {}  # storage → dynamic tensors that share it
        self._weights: dict[int, Tensor] = {}
        self._read_in_place: set[int] = set()  # storages of the weights
        self._sources_of_storage: dict[int, set[int]] = {}
        self.guards: list[tuple[Tensor, Tensor]] = []  # a weight, and a copy of its values
        self._guarded: set[int] = set()
        for name, tensor in inputs.items():
            self._remember(tensor, self.graph.input(name, tensor.shape))

    def value(self, tensor: Tensor) -> Any:
        """The value of a tensor of the step; a constant if it does not depend on the inputs."""
        if (found := self._values.get(id(tensor))) is not None:
            return found
        return self.lowering.as_value(tensor)

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function in _PASSED or not _any_tensor(arguments, options, self._is_dynamic):
            return self._run_constant(function, arguments, options)
        if torch.Tag.nondeterministic_seeded in function.tags and str(function) not in OPERATORS:
            raise UnsupportedOp(str(function))
        self._weights_in(arguments, options)
        if function._schema.is_mutable:
            return self._run_in_place(function, arguments, options)
        result = function(*arguments, **options)
        if function in _FACTORIES:
            self._kept.append(result)
            self._sources[id(result)] = frozenset()
            return result
        if not isinstance(result, Tensor | list | tuple):  # a choice that depends on the inputs
            raise UnsupportedOp(str(function))
        results = [result] if isinstance(result, Tensor) else list(result)
        values = self._translate(function, arguments, options)
        values = values if isinstance(values, list) else [values]
        for tensor, value in zip(results, values, strict=True):
            if isinstance(tensor, Tensor):
                self._check(function, tensor, value)
                self._remember(tensor, value)
        return result

    def _is_dynamic(self, tensor: Tensor) -> bool:
        return id(tensor) in self._values

    def _remember(self, tensor: Tensor, value: Any) -> None:
        self._kept.append(tensor)
        self._values[id(tensor)] = value
        self._memory.setdefault(_storage(tensor), []).append(tensor)

    def _check(self, function: Any, tensor: Tensor, value: Any) -> None:
        if value is None:  # a result that no node computes: it is unused, or its reader fails
            return
        real, expected = value.real if isinstance(value, ComplexValue) else value, tensor.shape
        if real.shape != expected or (tensor.is_floating_point() and tensor.dtype != self.graph.dtype):
            raise UnsupportedOp(f"{function} with a result of type {tensor.dtype}")

    def _weights_in(self, arguments: tuple, options: dict) -> set[int]:
        """The weights that the constants among arguments are, or were computed from; new ones are remembered."""
        sources: set[int] = set()

        def visit(tensor: Tensor) -> bool:
            if self._is_dynamic(tensor):
                return False
            known = self._sources.get(id(tensor))
            if known is None:
                self._kept.append(tensor)
                self._weights[id(tensor)] = tensor
                self._read_in_place.add(_storage(tensor))
                known = self._sources[id(tensor)] = frozenset({id(tensor)})
                self._sources_of_storage.setdefault(_storage(tensor), set()).update(known)
            sources.update(known)
            return False

        _any_tensor(arguments, options, visit)
        return sources

    def _run_constant(self, function: Any, arguments: tuple, options: dict) -> Any:
        """An operator on weights and other constants runs; its result remembers the weights."""
        sources = self._weights_in(arguments, options)
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise UnsupportedOp(str(function))
        result = function(*arguments, **options)
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                self._kept.append(tensor)
                self._sources[id(tensor)] = frozenset(sources) | self._sources.get(id(tensor), frozenset())
                self._sources_of_storage.setdefault(_storage(tensor), set()).update(self._sources[id(tensor)])
        return result

    def _run_in_place(self, function: Any, arguments: tuple, options: dict) -> Any:
        packet, overload = str(function).removeprefix("aten.").split(".", 1)
        # The operator whose result is written in place.
        target = getattr(getattr(aten, packet.removesuffix("_"), None), overload, None)
        if str(target) not in OPERATORS:
            raise UnsupportedOp(str(function))
        changed = arguments[0]
        if not self._is_dynamic(changed):
            raise UnsupportedOp(f"{function} of an input on a weight")
        value = self._translate(target, arguments, options)
        result = function(*arguments, **options)
        self._check(function, changed, value)
        for other in self._memory[_storage(changed)]:
            if _overlap(other, changed):
                self._values[id(other)] = None  # it holds other elements now, and must not be used
        self._values[id(changed)] = value
        return result

    def _translate(self, function: Any, arguments: tuple, options: dict) -> Any:
        given = [self._known(argument) for argument in arguments]
        named = {name: self._known(argument) for name, argument in options.items()}
        if function is aten._to_copy.default:
            return self.lowering.convert(given[0], options.get("dtype"))
        if function in MOVES:
            return self._moved(function, given, named)
        rule = OPERATORS.get(str(function))
        if rule is None:
            raise UnsupportedOp(str(function))
        try:
            return rule(self.lowering, *given, **named)
        except (AttributeError, TypeError) as error:  # arguments that a rule does not know
            raise UnsupportedOp(f"{function} with these arguments ({error})") from error

    def _known(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            if id(argument) not in self._values:
                return argument
            if (value := self._values[id(argument)]) is None:
                raise UnsupportedOp("a tensor that was changed in place, or a statistic of attention")
            return value
        if isinstance(argument, list | tuple):
            return [self._known(item) for item in argument]
        return argument

    def _moved(self, function: Any, given: list, named: dict) -> Any:
        first = given[0]
        if isinstance(first, Value) and (moved := self.lowering.move(function, first, given[1:])) is not None:
            return moved
        parts = first if isinstance(first, list) else [first]
        if any(isinstance(part, ComplexValue) for part in parts):
            return self._moved_parts(function, given, named)
        if any(isinstance(x, Value) for x in given[1:]):
            raise UnsupportedOp(f"{function} with an index that depends on the inputs")
        for index in given[1:]:
            for tensor in index if isinstance(index, list) else [index]:
                if isinstance(tensor, Tensor):
                    self._guard(tensor)
        values = [part if isinstance(part, Value) else self.value(part) for part in parts]
        indices = [self.graph.index(value) for value in values]
        arguments = [indices if isinstance(first, list) else indices[0], *given[1:]]
        if function in (aten.view.default, aten._unsafe_view.default):
            function = aten.reshape.default  # an index may have other strides than its tensor
        return self.graph.move(function, values, *arguments, **named)

    def _moved_parts(self, function: Any, given: list, named: dict) -> Any:
        def part(x: Any, name: str) -> Any:
            if isinstance(x, list):
                return [part(item, name) for item in x]
            if isinstance(x, ComplexValue) or (isinstance(x, Tensor) and x.is_complex()):
                return getattr(x, name)
            return x

        real, imag = (self._moved(function, [part(x, name) for x in given], named) for name in ("real", "imag"))
        if isinstance(real, list):
            return [ComplexValue(*pair) for pair in zip(real, imag, strict=True)]
        return ComplexValue(real, imag)

    def _fold(self, tensor: Tensor) -> Tensor:
        """The elements of a constant as the kernel reads them.

        The memory of a weight is read where it is, so that changes in place count. What was computed from weights is
        valid as long as these hold the same values, which the program compares at every step.
        """
        tensor = tensor.detach()
        if tensor.is_contiguous() and self.is_weight(tensor):
            return tensor
        self._guard(tensor)
        return tensor.to(self.graph.dtype).contiguous().clone()

    def owner(self, tensor: Tensor) -> Tensor:
        """The weight that a constant is part of, whose version counts changes in place, or the constant itself."""
        storage = _storage(tensor)
        return next((weight for weight in self._weights.values() if _storage(weight) == storage), tensor)

    def is_weight(self, tensor: Tensor) -> bool:
        """True for a weight in memory, and views of it, which the kernel can read where they are."""
        return tensor.dtype == self.graph.dtype and _storage(tensor) in self._read_in_place and not tensor.is_neg()

    def _guard(self, tensor: Tensor) -> None:
        """From now on, the weights that a constant was computed from must not change."""
        for number in self._sources_of_storage.get(_storage(tensor), set()) - self._guarded:
            weight = self._weights[number].detach()
            if not weight.is_contiguous():
                raise UnsupportedOp("a computation on a weight that is not contiguous")
            self._guarded.add(number)
            self.guards.append((weight, weight.clone()))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlap(x: Tensor, y: Tensor) -> bool:
    """True where two tensors of one storage may share elements; their strides are not looked at."""
    ends = [
        t.data_ptr() + sum((n - 1) * k for n, k in zip(t.shape, t.stride(), strict=True)) * t.itemsize for t in (x, y)
    ]
    return x.data_ptr() <= ends[1] and y.data_ptr() <= ends[0]


def _any_tensor(arguments: Any, options: dict, test: Callable[[Tensor], bool]) -> bool:
    """True if the test is true for a tensor of a call; it sees all of them until then."""
    stack = [*arguments, *options.values()]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            if test(item):
                return True
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return False
