"""An exported graph run with pairs of real tensors in place of complex ones, which most runtimes do not have."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from hf_recurrent.export.weight_types import NarrowWeight

aten = torch.ops.aten


class Pair(NamedTuple):
    real: Tensor
    imag: Tensor


class ComplexOperation(Exception):
    """A complex operation that is not supported as real ones."""


def _pair(value: Any) -> Pair:
    return value if isinstance(value, Pair) else Pair(value, torch.zeros_like(value))


def _multiply(x: Any, y: Any) -> Pair:
    if not isinstance(x, Pair):
        x, y = y, x
    if not isinstance(y, Pair):
        return Pair(x.real * y, x.imag * y)
    return Pair(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


def _divide(x: Any, y: Any) -> Pair:
    if not isinstance(y, Pair):
        return Pair(x.real / y, x.imag / y)
    size = y.real * y.real + y.imag * y.imag
    product = _multiply(_pair(x), Pair(y.real, -y.imag))
    return Pair(product.real / size, product.imag / size)


def _by_parts(function: Callable) -> Callable:
    def compute(x: Any, y: Any) -> Pair:
        return Pair(*map(function, _pair(x), _pair(y)))

    return compute


_add = _by_parts(operator.add)
# Operations that compute with complex numbers.
_ARITHMETIC: dict[Any, Callable] = {
    aten.complex.default: Pair,
    aten.mul.Tensor: _multiply,
    aten.div.Tensor: _divide,
    aten.add.Tensor: _add,
    aten.sub.Tensor: _by_parts(operator.sub),
    aten.neg.default: lambda x: Pair(-x.real, -x.imag),
    aten.addcmul.default: lambda base, x, y: _add(base, _multiply(x, y)),
    aten.view_as_real.default: lambda x: torch.stack(tuple(x), -1),
    aten.real.default: lambda x: x.real,
    aten.imag.default: lambda x: x.imag,
    aten.conj.default: lambda x: Pair(x.real, -x.imag),
}
# Operations that move elements: the same for both parts.
_MOVES = {
    aten.alias.default, aten.cat.default, aten.clone.default, aten.expand.default, aten.permute.default,
    aten.select.int, aten.slice.Tensor, aten.squeeze.dims, aten.squeeze.dim, aten.stack.default,
    aten.transpose.int, aten.unsqueeze.default, aten.view.default, aten.reshape.default,
}  # fmt: skip
_REAL_TYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def _part(value: Any, number: int) -> Any:
    if isinstance(value, Pair):
        return value[number]
    if isinstance(value, list | tuple) and any(isinstance(item, Pair) for item in value):
        return [_pair(item)[number] for item in value]
    return value


def _holds_pair(value: Any) -> bool:
    return isinstance(value, Pair) or (isinstance(value, list | tuple) and any(map(_holds_pair, value)))


class _PairInterpreter(fx.Interpreter):
    """Runs a graph; `weights` replace attributes of the same name."""

    def __init__(self, module: fx.GraphModule, weights: Callable[[str], Tensor | NarrowWeight]):
        super().__init__(module)
        self.weights = weights

    def get_attr(self, target, args, kwargs):
        return self.weights(target)

    def call_function(self, target, args, kwargs):
        if target is aten._assert_tensor_metadata.default:
            return None
        if target is aten.embedding.default and isinstance(args[0], NarrowWeight):
            return args[0](args[1])
        args = tuple(argument() if isinstance(argument, NarrowWeight) else argument for argument in args)
        if not _holds_pair(args) and target is not aten.complex.default:
            return super().call_function(target, args, kwargs)
        if target in _ARITHMETIC and not kwargs:
            return _ARITHMETIC[target](*args)
        if target in _MOVES:
            parts = ([_part(argument, number) for argument in args] for number in range(2))
            return Pair(*(target(*part, **kwargs) for part in parts))
        if target is aten._to_copy.default:
            kwargs = {**kwargs, "dtype": _REAL_TYPES.get(kwargs.get("dtype"), kwargs.get("dtype"))}
            return Pair(*(target(part, **kwargs) for part in args[0]))
        if target is aten.constant_pad_nd.default:
            value = args[2] if len(args) > 2 else 0
            return Pair(target(args[0].real, args[1], value), target(args[0].imag, args[1], 0))
        if target is aten.masked_fill.Scalar:
            return Pair(target(args[0].real, args[1], args[2]), target(args[0].imag, args[1], 0))
        raise ComplexOperation(str(target))


class RealModule(nn.Module):
    """The function of an exported graph, in real numbers.

    Args:
        program: of the graph, after decompositions.
        load: name of a weight → the one to compute with; by default the program's own.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, load: Callable[[str], NarrowWeight | None] | None = None
    ):
        super().__init__()
        graph = program.module(check_guards=False)
        # In a list, so that only the weights that are computed with belong to this module.
        self._graphs, self._load = [graph], load
        self._names: dict[str, str] = {}
        for node in graph.graph.nodes:
            if node.op != "get_attr" or node.target in self._names or (load and load(node.target) is not None):
                continue
            value: Any = graph
            for part in node.target.split("."):
                value = getattr(value, part)
            self._names[node.target] = f"weight_{len(self._names)}"
            self.register_buffer(self._names[node.target], value.detach())

    def _weight(self, name: str) -> Tensor | NarrowWeight:
        return getattr(self, self._names[name]) if name in self._names else self._load(name)

    def forward(self, inputs: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return tuple(_PairInterpreter(self._graphs[0], self._weight).run(inputs, *state))


def has_complex(program: ExportedProgram) -> bool:
    """True where a value of the graph is complex."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    return any(isinstance(value, Tensor) and value.is_complex() for value in values)
