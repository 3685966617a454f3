"""Building a model on the meta device and initialising it part by part, with the weights that one process would draw.

A model takes its random numbers from the global generator of the CPU: constructors of modules, then initialisation,
which every model in a model does on its own. While it is built on the meta device, as many numbers are drawn and
dropped, and the generator's state before each initialisation is noted. Later every process draws the numbers again and
keeps its part of one layer at a time. So the weights do not depend on the number of processes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.tensor_files import copy_whole
from hf_recurrent.modeling.contexts.count_memory import CountMemory

Built = TypeVar("Built", bound=PreTrainedModel)

# Model → the models in it and itself in the order of their initialisation, each with the generator's state before.
_initializations: WeakKeyDictionary[nn.Module, list[tuple[PreTrainedModel, torch.Tensor]]] = WeakKeyDictionary()


class _SameDraws(TorchDispatchMode):
    """Random operations on meta tensors take as many numbers from the generator of the CPU as on the CPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags:
            function(*map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})
        return function(*args, **kwargs)


def _on_cpu(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.empty_like(value, device="cpu")
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def build_on_meta(build: Callable[[], Built]) -> Built:
    """Call `build`, for example `AutoModelForCausalLM.from_config`, without memory for weights.

    The generator of the CPU is in the same state afterwards as if the model had been built there.
    """
    initializations: list[tuple[PreTrainedModel, torch.Tensor]] = []

    def note(model: PreTrainedModel) -> None:
        initializations.append((model, torch.random.get_rng_state()))
        model.initialize_weights()
        model.tie_weights(recompute_mapping=False)

    with _SameDraws(), torch.device("meta"), patch.object(PreTrainedModel, "init_weights", note):
        model = build()
    _initializations[model] = initializations
    return model


@torch.no_grad()
def initialize_parts(model: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
    """Give a sharded model on the meta device its initial weights, one layer at a time; no communication.

    Its `layers`, outermost first, are whole in memory one after another; then the rest. `device` keeps the parts of
    this process. A model that [`build_on_meta`] has not built takes numbers from where the generator stands.
    """
    _to_empty(model, device)
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    noted = [entry for part in models for entry in _initializations.get(part, ())]
    before = torch.random.get_rng_state()
    for module in model.modules():
        module._is_hf_initialized = False
    units = _Units(model, layers)
    for part in models:
        part._init_weights = partial(units.initialize, part._init_weights)
    try:
        for part, state in noted or [(part, None) for part in models]:
            if state is not None:
                torch.random.set_rng_state(state)
            part.initialize_weights()
    finally:
        for part in models:
            del part._init_weights
    for unit in list(units.whole):
        units.shard(unit)
    if noted:
        torch.random.set_rng_state(before)


def _to_empty(model: nn.Module, device: torch.device) -> None:
    """`Module.to_empty`, which would give tied parameters a memory each."""
    empty: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        kept = torch.device("cpu") if isinstance(module, CountMemory) else device  # it reads on the CPU alone
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in empty:
                    made = torch.empty_like(tensor, device=kept)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    empty[tensor] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
                tensors[name] = empty[tensor]


class _Units:
    """Layers, and the rest of a model: each is whole while its modules are initialised, and sharded after the last.

    A model initialises the modules of a layer one after another.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]):
        self.modules_of = {unit: set(unit.modules()) for unit in (*layers, model)}
        self.unit_of: dict[nn.Module, nn.Module] = {}
        for unit in (*reversed(layers), model):
            for module in unit.modules():
                self.unit_of.setdefault(module, unit)
        self.whole: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}
        # Tied weights are initialised apart from those that then take their place, as while a model is built.
        self.replaced = {
            (model.get_submodule(f"{prefix}.{name}".strip(".").rpartition(".")[0]), name.rpartition(".")[2])
            for prefix, part in model.named_modules()
            for name in getattr(part, "all_tied_weights_keys", None) or ()
        }

    def initialize(self, init_weights: Callable[[nn.Module], None], module: nn.Module) -> None:
        """Call `_init_weights` of a model, whose parameters are sharded, for a module that is whole."""
        for left in [unit for unit in self.whole if module not in self.modules_of[unit]]:
            self.shard(left)
        unit = self.unit_of[module]
        if unit not in self.whole:
            self.whole[unit] = self.make_whole(unit)
        init_weights(module)

    def make_whole(self, unit: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Replace the sharded parameters of a unit by empty ones; returns them with their places."""
        parts = [
            (module, name, part)
            for module in unit.modules()
            if self.unit_of[module] is unit
            for name, part in module._parameters.items()
            if part is not None
        ]
        for module, name, part in parts:
            module._parameters[name] = nn.Parameter(torch.empty(part.shape, dtype=part.dtype), part.requires_grad)
        return parts

    def shard(self, unit: nn.Module) -> None:
        """Keep the part of this process of every parameter of a unit."""
        for module, name, part in self.whole.pop(unit, ()):
            if (module, name) not in self.replaced:
                copy_whole(part, module._parameters[name])
            module._parameters[name] = part
