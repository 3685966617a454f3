"""How processes share a model: each has a copy (one process, DDP), or each has a part of every weight (FSDP2).

A trainer asks the `Replication` or `FullSharding` that it got from [`build_sharding`], and nothing else in the package
asks how a run is distributed. Checkpoints, streams and losses are the same for both.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from transformers import PreTrainedModel, TrainingArguments

from hf_recurrent.learning_rules.rowwise_adagrad import sparse_tables
from hf_recurrent.trainers.freed_memory import return_freed_memory
from hf_recurrent.trainers.meta_initialization import initialize_parts

# Of transformers, the newest name first: 5.23 has renamed it, and warns about the old name.
CHECKPOINTING_FLAGS = tuple(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)
_REQUEST = "ACCELERATE_USE_FSDP"


@dataclass(frozen=True)
class ShardingSettings:
    """Settings of FSDP2, as `accelerate launch` (or `torchrun`) gives them in environment variables."""

    offload: bool = False  # keep the parts of a process in the memory of the CPU, and optimize there
    reshard_after_forward: bool = True  # free the weights of a layer after its forward pass, and gather them again
    activation_checkpointing: bool = False  # recompute the activations of a layer in the backward pass


def requested_sharding(environment: Mapping[str, str] = os.environ) -> ShardingSettings | None:
    """The settings that the launcher asks for; None for a copy of the model in every process.

    Raises:
        ValueError: the launcher asks for something else than DDP or FSDP2.
    """

    def is_set(name: str) -> bool:
        return environment.get(name, "false").lower() in ("1", "true", "yes")

    if is_set("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "`distributed_type` of accelerate is DEEPSPEED; it must be MULTI_GPU (DDP) or FSDP with `fsdp_version` 2, "
            "because DeepSpeed's optimizer states cannot be saved without pickle."
        )
    if not is_set(_REQUEST):
        return None
    version = environment.get("FSDP_VERSION", "1")
    if version != "2":
        raise ValueError(f"`fsdp_version` of accelerate is {version}; it must be 2.")
    if is_set("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise ValueError(
            "`fsdp_cpu_ram_efficient_loading` of accelerate is true; it must be false: every process reads its own "
            "part of the weights."
        )
    return ShardingSettings(
        offload=is_set("FSDP_OFFLOAD_PARAMS"),
        reshard_after_forward=environment.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true",
        activation_checkpointing=is_set("FSDP_ACTIVATION_CHECKPOINTING"),
    )


def recompute_activations(args: TrainingArguments) -> None:
    """Switch activation checkpointing on."""
    for name in CHECKPOINTING_FLAGS:
        setattr(args, name, True)


def is_sharding_requested() -> bool:
    """True if the trainers of this run will shard their models."""
    return requested_sharding() is not None and dist.is_initialized()


@contextmanager
def sharding_by_trainer() -> Iterator[None]:
    """Inside the block, accelerate does not learn that FSDP was asked for: it would shard by rules of its own.

    It shards no model on CPUs, casts states to bfloat16, and finds the parameters of the optimizer by their addresses.
    """
    before = os.environ.pop(_REQUEST, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[_REQUEST] = before


def build_sharding(device: torch.device, by_layer: bool) -> "Replication":
    """The way in which this run is distributed; not `by_layer`, all weights are gathered at once."""
    if not is_sharding_requested():
        return Replication()
    return FullSharding(device, requested_sharding(), by_layer)


class Replication:
    """Every process holds the whole model."""

    is_sharded = False
    settings = ShardingSettings()

    def shard(self, model: nn.Module) -> None:
        """Shard a model in place, before its optimizer is built; one on the meta device gets its initial weights."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside the block, the weights outside of layers (by layer) or all of them are whole in every process."""
        yield

    @contextmanager
    def joined(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Inside the block, processes may run the model unequal numbers of times, without gradients.

        Args:
            should_stop: asked before every forward pass.

        Raises:
            EarlyStop: in all processes, after `should_stop` was true in one.
        """
        yield


class EarlyStop(Exception):
    """A process wants the passes of all processes to end."""


class FullSharding(Replication):
    """FSDP2: every process holds a part of each weight, of its gradient and of its optimizer states.

    By layer, the weights of a layer are gathered when it runs. Otherwise the model is one unit, whose weights are
    whole from the beginning of a block to the end of its backward pass: RTRL adds to gradients of whole weights, and
    the methods of a teacher are no forward passes.
    """

    is_sharded = True

    def __init__(self, device: torch.device, settings: ShardingSettings, by_layer: bool):
        self.device, self.settings, self.by_layer = device, settings, by_layer
        self._root: nn.Module | None = None
        self._has_run = False

    def shard(self, model: nn.Module) -> None:
        if isinstance(model, FSDPModule):
            self._root = model
            return
        if self.device.type == "cpu" or self.settings.offload:
            return_freed_memory()
        policy = CPUOffloadPolicy() if self.settings.offload and self.device.type != "cpu" else OffloadPolicy()
        options: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (dist.get_world_size(),)),
            "offload_policy": policy,
        }
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        if not on_meta:
            self._take_from_first(model)
        # With frozen weights (LoRA), processes may reach the backward passes of layers in different orders, and wait.
        self.by_layer &= all(parameter.requires_grad for parameter in model.parameters())
        layers = _layers(model) if self.by_layer else []
        for layer in layers:
            fully_shard(layer, reshard_after_forward=self.settings.reshard_after_forward, **options)
        # FSDP2 reduces no sparse gradients: each process keeps the tables whole, and `TableGradients` averages.
        tables = set(sparse_tables(model).values())
        fully_shard(model, reshard_after_forward=False, ignored_params=tables, **options)
        self._root = model
        if on_meta:
            kept = torch.device("cpu") if isinstance(policy, CPUOffloadPolicy) else self.device
            initialize_parts(model, layers, kept)
        for table in sparse_tables(model).values():
            table.data = table.data.to(self.device)

    def _take_from_first(self, model: nn.Module) -> None:
        """Give all processes the weights of the first, as DDP does."""
        for tensor in (*model.parameters(), *model.buffers()):
            value = tensor.detach().to(self.device, copy=True).contiguous()
            dist.broadcast(value.view(-1).view(torch.uint8), 0)  # as bytes: no back end has all integer types
            tensor.data.copy_(value)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self._root.unshard()
        try:
            yield
        finally:
            self._root.reshard()

    @contextmanager
    def joined(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
        with self.gathered():
            if not self.by_layer:  # then no forward pass waits for another process
                yield
                return
            turns = _Turns(self._root, self.device, should_stop)
            if not self._has_run:  # the first pass through the root tells its layers that they are not roots
                turns.idle_pass()
                self._has_run = True
            with turns.announcing():
                yield


class _Turns:
    """Equal numbers of forward passes: a process without work runs the model on one token as long as others work."""

    def __init__(self, root: nn.Module, device: torch.device, should_stop: Callable[[], bool]):
        self.root, self.device, self.should_stop = root, device, should_stop

    @contextmanager
    def announcing(self) -> Iterator[None]:
        # An adapter's model calls the forward method of the model in it, but generates with the model itself.
        models = {self.root, *(part for part in self.root.modules() if isinstance(part, PreTrainedModel))}
        top = {model for model in models if hasattr(model, "lm_head") or model is self.root}
        hooks = [model.register_forward_pre_hook(self._announce, prepend=True) for model in top]
        try:
            yield
        except EarlyStop:
            raise
        except BaseException:
            self._agree(working=False, failed=True)
            raise
        finally:
            for hook in hooks:
                hook.remove()
        while self._agree(working=False):
            self.idle_pass()

    def _announce(self, *_: Any) -> None:
        self._agree(working=True)

    def _agree(self, working: bool, failed: bool = False) -> bool:
        """True if some process works; raises in all of them if one wants to end."""
        votes = torch.tensor([working, self.should_stop(), failed], dtype=torch.int32, device=self.device)
        dist.all_reduce(votes)
        some_work, some_stop, some_failed = votes.tolist()
        if some_failed and not failed:
            raise RuntimeError("Another process failed while this one ran the model.")
        if some_stop and not failed:
            raise EarlyStop
        return bool(some_work)

    @torch.no_grad()
    def idle_pass(self) -> None:
        """Take part in the gathering of one forward pass."""
        training = self.root.training
        self.root.eval()
        self.root(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
        self.root.train(training)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers that a model says must not be split, outermost first."""
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names]
