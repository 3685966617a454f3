"""Memory of one process that trains, from a step that runs on tensors without memory.

The step is the same as in the trainers: the carried state goes in, the loss of a block is propagated back, and the
optimizer updates. Autograd runs, so that the peak includes the backward pass and checkpointing. Sharding is added as
arithmetic: nothing is communicated here.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only
from transformers import TrainingArguments

from hf_recurrent.kernels.output_memory import simulated_kernels
from hf_recurrent.learning_rules import sensitivities
from hf_recurrent.learning_rules.optimizers import frozen
from hf_recurrent.learning_rules.rowwise_adagrad import sparse_tables
from hf_recurrent.learning_rules.rules import diagonal_recurrence
from hf_recurrent.learning_rules.traced_unit import TracedUnit, find_traced_parameters
from hf_recurrent.modeling.units.recurrent_unit import RecurrentUnit
from hf_recurrent.planning.setting import BPTT, DMT, Setting
from hf_recurrent.planning.training_steps import NextTokenSteps, build_optimizer, build_steps
from hf_recurrent.stock_models.stock_model import StockModelWithState
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher


class LiveMemory(TorchDispatchMode):
    """Counts every storage once, from the operation that makes it until the last tensor on it is gone.

    Autograd runs as usual under it, so that what the backward pass needs is alive until it was used.

    `now` and `peak` are live bytes; `gradients` are bytes that the caller counts, `peak_gradients` their number at the
    peak.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.gradients = self.peak_gradients = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        results = operation(*arguments, **(options or {}))
        tree_map_only(torch.Tensor, self._note, results)
        return results

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.is_sparse:  # its rows and values are counted
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            if self.now > self.peak:
                self.peak, self.peak_gradients = self.now, self.gradients
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, address: int) -> None:
        self.now -= self._known.pop(address)


@contextmanager
def fake_memory() -> Iterator[LiveMemory]:
    """Inside the block, tensors are fake, and live ones are counted."""
    with FakeTensorMode(allow_non_fake_inputs=True), LiveMemory() as memory:
        yield memory


def probes_with_values() -> AbstractContextManager:
    """Inside the block, `SensitivityEngine` works on a model of fake tensors.

    A unit that it runs once to examine it is a copy with values; its compiled kernel, which needs addresses, is not
    used.
    """
    return patch.multiple(sensitivities, find_traced_parameters=_find_by_copy, sensitivities_cpu=None)


def _find_by_copy(name: str, unit: RecurrentUnit, dtype: torch.dtype) -> TracedUnit:
    with _disable_current_modes():
        found = find_traced_parameters(name, _copy_with_values(unit), dtype)
    own = dict(unit.named_parameters(recurse=False))
    linears = {child: getattr(unit, child) for child in found.linears}
    return TracedUnit(name, unit, linears, {vector: own[vector] for vector in found.vectors})


def _copy_with_values(unit: RecurrentUnit) -> RecurrentUnit:
    tensors = (*unit.parameters(), *unit.buffers())
    twin = copy.deepcopy(unit, {id(tensor): _values(tensor) for tensor in tensors})
    if twin.__dict__.pop("recur", None) is not None:  # added by SnAp-1, a function of the fake unit
        twin.recur = diagonal_recurrence(twin)
    return twin


def _values(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.randn(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(0)) / 10
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


_ROLLOUTS = (8, 12)  # steps of DMT: with fewer, activations do not grow evenly yet


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process, by use."""

    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    communication: int  # gradient buckets of DDP; gathered parameters and unreduced gradients of FSDP2
    state: int  # the carried states of all streams of the process
    sensitivities: int
    activations: int  # tensors that live within a step only: saved by autograd, or temporary, at the peak
    host: int = 0  # in the memory of the host instead of the device

    @property
    def total(self) -> int:
        """Bytes of the device at the peak."""
        parts = (self.parameters, self.gradients, self.optimizer, self.communication)
        return sum(parts) + self.state + self.sensitivities + self.activations


@dataclass(frozen=True)
class _SingleProcess:
    """The memory of a single process, and bytes of its parts."""

    memory: TrainingMemory
    gradients: int  # of all but tables, whose gradients are sparse
    tables: int
    layers: list[int]  # each part that FSDP2 gathers one after another; empty if it gathers the whole model at once
    can_checkpoint: bool


class MemoryCounter:
    """Counts the memory of one process that trains with the optimizer of `arguments`, for any number of settings.

    `build` makes the model, or RNN and teacher as one; it is called where tensors have no memory.
    """

    def __init__(self, build: Callable[[], nn.Module], arguments: TrainingArguments):
        self._count_single = cache(partial(_count_single, build, arguments))

    def count(self, setting: Setting) -> TrainingMemory:
        """The memory of one process of a run; raise a ValueError if the model does not support the method."""
        return _distributed(self._count_single(_alone(setting)), setting)

    def can_checkpoint(self, setting: Setting) -> bool:
        """True if the model and the method support gradient checkpointing."""
        return self._count_single(_alone(setting)).can_checkpoint


def _alone(setting: Setting) -> Setting:
    return replace(setting, processes=1, sharding=None)


def _count_single(build: Callable[[], nn.Module], arguments: TrainingArguments, setting: Setting) -> _SingleProcess:
    """The memory of a single process.

    A rollout of DMT runs step by step, which takes long without memory too. Its activations are proportional to its
    steps, and extrapolated from two short rollouts, in which the teacher reads one byte of context. There only
    activations are counted: in short rollouts, gradients and optimizer need more, and hide how activations grow.
    """
    rollout = setting.block_size - setting.first_anchor
    short, long = _ROLLOUTS
    if setting.method != DMT or rollout <= long:
        return _run(build, arguments, setting)

    def build_without_context() -> nn.Module:
        objective = build()
        objective.context_length = 1
        return objective

    def with_rollout(steps: int, anchors: int) -> Setting:
        size = setting.first_anchor + steps
        return replace(setting, block_size=size, stride=size, anchors=anchors)

    labels_all = setting.anchors == rollout
    first, second = (
        _run(
            build_without_context,
            arguments,
            with_rollout(steps, steps if labels_all else setting.anchors),
            activations_only=True,
        ).memory.activations
        for steps in _ROLLOUTS
    )
    extrapolated = second + (second - first) * (rollout - long) // (long - short)
    counted = _run(build, arguments, with_rollout(short, setting.anchors))
    memory = replace(counted.memory, activations=max(counted.memory.activations, extrapolated))
    return replace(counted, memory=memory)


def _run(
    build: Callable[[], nn.Module], arguments: TrainingArguments, setting: Setting, activations_only: bool = False
) -> _SingleProcess:
    # Compiled kernels keep fewer tensors than plain torch; they are of the CPU.
    kernels = simulated_kernels() if arguments.device.type == "cpu" else nullcontext()
    with fake_memory() as memory, probes_with_values(), kernels, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that older transformers need
        model = with_state(build()).train()
        if setting.checkpointing:
            model.gradient_checkpointing_enable()
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        with frozen(*(model.frozen_modules if isinstance(model, StudentAndTeacher) else ())):
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            tables = list(sparse_tables(model).values())
            optimizer, optimizer_bytes = _optimizer_with_state(model, trained, arguments, memory)
            steps = build_steps(model, setting)
            _watch_gradients(trained, memory, drop=activations_only)
            memory.peak = 0
            for group in range(setting.accumulation):
                steps.run(group)
            if not activations_only:
                optimizer.step()
        gradients = sum(parameter.nbytes for parameter in trained) - sum(table.nbytes for table in tables)
        held = parameters + optimizer_bytes + steps.state_bytes + steps.sensitivity_bytes + memory.peak_gradients
    counted = TrainingMemory(
        num_parameters=model.num_parameters(),
        parameters=parameters,
        gradients=memory.peak_gradients,
        optimizer=optimizer_bytes,
        communication=0,
        state=steps.state_bytes,
        sensitivities=steps.sensitivity_bytes,
        activations=max(memory.peak - held, 0),
    )
    by_layer = setting.method == BPTT and len(trained) == len(list(model.parameters()))
    layers = [_parameter_bytes(layer) for layer in _layers(model)] if by_layer else []
    drops_state = isinstance(model, StockModelWithState) and isinstance(steps, NextTokenSteps) and steps.carries_state
    is_rule = isinstance(steps, NextTokenSteps) and steps.rule is not None
    table_bytes = sum(table.nbytes for table in tables)
    return _SingleProcess(counted, gradients, table_bytes, layers, can_checkpoint=not drops_state and not is_rule)


def _optimizer_with_state(
    model: nn.Module, trained: list[nn.Parameter], arguments: TrainingArguments, memory: LiveMemory
) -> tuple[torch.optim.Optimizer, int]:
    """The optimizer of the arguments after a step with zero gradients, and the bytes of the state that it made."""
    optimizer = build_optimizer(model, trained, arguments)
    before = memory.now
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, memory.now - before


def _watch_gradients(trained: list[nn.Parameter], memory: LiveMemory, drop: bool) -> None:
    """Count the gradient of each parameter when it is first complete, or drop it."""
    seen = set()

    def use(parameter: nn.Parameter) -> None:
        if drop or parameter.grad.is_sparse:  # of a table: its rows are counted as activations
            parameter.grad = None
        elif id(parameter) not in seen:
            seen.add(id(parameter))
            memory.gradients += parameter.nbytes

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(use)


def _distributed(single: _SingleProcess, setting: Setting) -> TrainingMemory:
    """The memory of one of several processes.

    DDP has a copy of all gradients in its buckets. FSDP2 has a share of parameters, gradients and optimizer state; and
    whole, the part of the model that is in no layer, two layers of parameters (one is fetched while the other runs)
    and two of gradients (one is sent while the other is made). Without layers, all parameters and gradients are whole.
    Tables are whole in every process.
    """
    counted, gradients, layers, tables = single.memory, single.gradients, single.layers, single.tables
    if setting.sharding is None:
        return replace(counted, communication=gradients if setting.processes > 1 else 0)
    dense = counted.parameters - tables
    whole = dense - sum(layers) + 4 * max(layers) if layers else dense + gradients
    parts = {
        "parameters": -(-dense // setting.processes),
        "gradients": -(-gradients // setting.processes),
        "optimizer": -(-counted.optimizer // setting.processes),
    }
    if setting.sharding.offload:
        kept = dict.fromkeys(parts, 0) | {"parameters": tables}
        return replace(counted, **kept, host=sum(parts.values()), communication=whole)
    parts["parameters"] += tables
    return replace(counted, **parts, communication=whole)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The largest list of modules, the layers that FSDP2 gathers one by one."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(map(_parameter_bytes, layers)), default=[])


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
