"""Memory of one process that trains, from a step that runs on tensors without memory.

The step is that of the trainers: the carried state goes in, the loss of a block is propagated back, and the optimizer
updates. Autograd runs, so that the peak is that of the backward pass, checkpointing and all. Sharding is added as
arithmetic: nothing is communicated here.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_recurrent.learning_rules.rules import LearningRule, build_learning_rule
from hf_recurrent.modeling.recurrent_state import RecurrentState
from hf_recurrent.planning.live_memory import LiveMemory, imagined_memory
from hf_recurrent.planning.unit_probes import probes_with_values
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.trainers.next_token_loss import next_token_loss

REPLICATED, SHARDED = "ddp", "fsdp2"


@dataclass(frozen=True)
class Setting:
    """The arguments of training that memory depends on.

    Attributes:
        method: bptt or the name of a learning rule.
        streams: B, of one process and micro-batch.
        block_size: steps of an optimizer step.
        stride: T, steps of a forward and backward pass.
        accumulation: micro-batches per optimizer step.
        bfloat16: autocast.
        checkpointing: gradient checkpointing.
        carries_state: whether the state goes from block to block.
        processes: number of processes.
        sharding: "ddp" or "fsdp2".
        offload: parameters, gradients and optimizer state are in the memory of the host.
    """

    method: str = "bptt"
    streams: int = 8
    block_size: int = 256
    stride: int = 256
    accumulation: int = 1
    bfloat16: bool = False
    checkpointing: bool = False
    carries_state: bool = True
    processes: int = 1
    sharding: str = REPLICATED
    offload: bool = False


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one process, by what they hold; `host` is in the memory of the host instead of the device.

    Attributes:
        activations: everything that lives within a step only: what autograd keeps, and temporary tensors, at the peak.
        communication: gradient buckets of DDP; gathered parameters and unreduced gradients of FSDP2.
        state: the carried states of all streams of the process.
    """

    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    communication: int
    state: int
    sensitivities: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes of the device at the peak."""
        parts = (self.parameters, self.gradients, self.optimizer, self.communication)
        return sum(parts) + self.state + self.sensitivities + self.activations


def training_memory(
    build: Callable[[], PreTrainedModel], arguments: TrainingArguments, setting: Setting
) -> TrainingMemory:
    """Count the memory of one process.

    Args:
        build: makes the model; called where tensors have no memory.
        arguments: gives the optimizer.
        setting: everything else.

    Raises:
        ValueError: the model does not support the method.
    """
    return distributed(undistributed(build, arguments, setting), setting)


@dataclass(frozen=True)
class Undistributed:
    """The memory of a single process, and what sharding depends on: bytes of all gradients and of each layer."""

    memory: TrainingMemory
    gradients: int
    layers: list[int]


def undistributed(
    build: Callable[[], PreTrainedModel], arguments: TrainingArguments, setting: Setting
) -> Undistributed:
    """See [`training_memory`], for one process whatever the setting says about several."""
    with imagined_memory() as memory, probes_with_values(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names that older transformers need
        model = with_state(build()).train()
        if setting.checkpointing:
            model.gradient_checkpointing_enable()
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer, optimizer_bytes = _optimizer_with_state(model, trained, arguments, memory)
        rule = None if setting.method == "bptt" else build_learning_rule(setting.method, model)
        carried = [zero_carried(model, rule, setting) for _ in range(setting.accumulation)]
        state, sensitivities = (sum(_nbytes(both[part]) for both in carried) for part in (0, 1))
        _count_gradients(trained, memory)
        memory.peak = 0
        for group, (its_state, its_sensitivities) in enumerate(carried):
            carried[group] = (micro_batch(model, rule, its_state, its_sensitivities, setting), its_sensitivities)
        optimizer.step()
        gradients = sum(parameter.nbytes for parameter in trained)
        held = parameters + optimizer_bytes + state + sensitivities + memory.peak_gradients
    counted = TrainingMemory(
        num_parameters=model.num_parameters(),
        parameters=parameters,
        gradients=memory.peak_gradients,
        optimizer=optimizer_bytes,
        communication=0,
        state=state,
        sensitivities=sensitivities,
        activations=max(memory.peak - held, 0),
    )
    return Undistributed(counted, gradients, [_parameter_bytes(layer) for layer in _layers(model)])


def _optimizer_with_state(
    model: nn.Module, trained: list[nn.Parameter], arguments: TrainingArguments, memory: LiveMemory
) -> tuple[torch.optim.Optimizer, int]:
    """The optimizer of the arguments after a step with zero gradients, and the bytes of the state that it made."""
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    optimizer = optimizer_class(trained, **options)
    before = memory.now
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, memory.now - before


def _count_gradients(trained: list[nn.Parameter], memory: LiveMemory) -> None:
    seen = set()

    def count(parameter: nn.Parameter) -> None:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            memory.gradients += parameter.nbytes

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(count)


def zero_carried(
    model: PreTrainedModel, rule: LearningRule | None, setting: Setting
) -> tuple[RecurrentState | None, RecurrentState]:
    """State, None where none is carried, and sensitivities of the streams of one micro-batch."""
    if not setting.carries_state:
        return None, {}
    return model.init_state(setting.streams), {} if rule is None else rule.init_carried(setting.streams)


def micro_batch(
    model: PreTrainedModel,
    rule: LearningRule | None,
    state: RecurrentState | None,
    sensitivities: RecurrentState,
    setting: Setting,
    most_strides: int | None = 2,
) -> RecurrentState | None:
    """Forward and backward of one micro-batch, stride by stride; returns the state after it.

    Args:
        most_strides: by default two, of which the second finds what the first one leaves; more need no more memory.
    """
    shape = (setting.streams, setting.stride)
    ids = torch.zeros(shape, dtype=torch.long, device=model.device)
    inputs = {"input_ids": ids, "shift_labels": torch.zeros_like(ids), "reset_mask": torch.zeros_like(ids).bool()}
    targets = torch.ones((), device=model.device)
    strides = setting.block_size // setting.stride
    if most_strides is not None:
        strides = min(strides, most_strides)
    for _ in range(strides):
        given = inputs if state is None else inputs | {"state": state}
        with rule.block(sensitivities) if rule else nullcontext():
            with torch.autocast(model.device.type, torch.bfloat16, enabled=setting.bfloat16):
                loss, output = next_token_loss(model, model, given, targets, returns_state=state is not None)
            if state is not None:
                state = {name: tensor.detach() for name, tensor in output.state.items()}
            loss.backward()
            del loss, output
    return state


def _nbytes(tensors: RecurrentState | None) -> int:
    return sum(tensor.nbytes for tensor in (tensors or {}).values())


def distributed(single: Undistributed, setting: Setting) -> TrainingMemory:
    """The memory of one of several processes.

    DDP has a copy of all gradients in its buckets. FSDP2 has a share of parameters, gradients and optimizer state; and
    whole, the part of the model that is in no layer, two layers of parameters (one is fetched while the other runs)
    and two of gradients (one is sent while the other is made).
    """
    counted, gradients, layers = single.memory, single.gradients, single.layers
    if setting.sharding == REPLICATED:
        return replace(counted, communication=gradients if setting.processes > 1 else 0)
    whole = counted.parameters - sum(layers) + 4 * max(layers, default=0)
    parts = {
        "parameters": -(-counted.parameters // setting.processes),
        "gradients": -(-gradients // setting.processes),
        "optimizer": -(-counted.optimizer // setting.processes),
    }
    if setting.offload:
        return replace(counted, **dict.fromkeys(parts, 0), host=sum(parts.values()), communication=whole)
    return replace(counted, **parts, communication=whole)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The largest list of modules, the layers that FSDP2 gathers one by one."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(map(_parameter_bytes, layers)), default=[])


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
