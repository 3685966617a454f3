"""Narrow types for the large weights of an exported program: int8 with a scale per output channel, or bfloat16.

Shape letters: I inputs of a linear map.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from hf_recurrent.kernels.weight_rows import quantize_rows
from hf_recurrent.modeling.contexts.ngram_embedding import NgramEmbedding

WEIGHT_TYPES = ("bfloat16", "int8")
aten = torch.ops.aten
# Places of the weights among the arguments.
_READERS = {aten.linear.default: (1,), aten.embedding.default: (0,), aten.gru_cell.default: (2, 3)}


@torch.no_grad()
def round_weights(model: nn.Module, kind: str) -> None:
    """Round all linear maps and embeddings of a model, in place, to the values that such weights can have.

    Its blocks then give what the compiled step with these weights gives, up to the rounding of its inputs.

    Raises:
        ValueError: the type is unknown.
    """
    _check_type(kind)
    rounded: set[int] = set()
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Embedding | nn.RNNCellBase | NgramEmbedding):
            continue
        for weight in module.parameters(recurse=False):
            if weight.dim() != 2 or weight.data_ptr() in rounded:  # an embedding may be tied to the head
                continue
            rounded.add(weight.data_ptr())
            weight.copy_(NarrowWeight(weight, kind)())


def _check_type(kind: str) -> None:
    if kind not in WEIGHT_TYPES:
        raise ValueError(f"`weights` is {kind!r}; it must be one of {', '.join(map(repr, WEIGHT_TYPES))}, or None.")


class NarrowWeight(nn.Module):
    """A weight in a narrow type, computed with in its own."""

    def __init__(self, weight: Tensor, kind: str):
        super().__init__()
        self.dtype = weight.dtype
        values, scale = quantize_rows(weight) if kind == "int8" else (weight.to(torch.bfloat16), None)
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)

    def forward(self, rows: Tensor | None = None) -> Tensor:
        """The weight, or some of its rows, of which a step reads few."""
        values, scale = self.values, self.scale
        if rows is not None:
            values, scale = (None if part is None else nn.functional.embedding(rows, part) for part in (values, scale))
        values = values.to(self.dtype)
        return values if scale is None else values * scale


class WeightLoader(nn.Module):
    """Holds the narrow weights of one program.

    Raises:
        ValueError: the type is unknown.
    """

    def __init__(self, kind: str | None):
        super().__init__()
        if kind is not None:
            _check_type(kind)
        self.type = kind
        self.narrow = nn.ModuleList()
        self._places: dict[str, int] = {}

    def bind(self, program: ExportedProgram) -> Callable[[str], NarrowWeight | None] | None:
        """Make narrow weights of those that linear maps and embeddings of a program read."""
        if self.type is None:
            return None
        state, names = program.state_dict, program.graph_signature.inputs_to_parameters
        by_memory: dict[int, int] = {}
        for node in program.graph.nodes:
            for place in _READERS.get(node.target, ()):
                if (name := names.get(node.args[place].name)) is None:
                    continue
                weight = state[name].detach()
                if weight.data_ptr() not in by_memory:  # an embedding may be tied to the head
                    by_memory[weight.data_ptr()] = len(self.narrow)
                    self.narrow.append(NarrowWeight(weight, self.type))
        # By all names that a weight has.
        places = {name: by_memory.get(weight.data_ptr()) for name, weight in state.items()}
        self._places = {name: place for name, place in places.items() if place is not None}
        return self

    def forward(self, name: str) -> NarrowWeight | None:
        """The weight of that name, or None where it is not narrow."""
        place = self._places.get(name)
        return None if place is None else self.narrow[place]
