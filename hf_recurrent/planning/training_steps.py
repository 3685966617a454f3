"""Forward and backward passes of a run on blocks of zeros, and their rate on this machine."""

import time
from contextlib import nullcontext

import torch
from torch import nn
from transformers import Trainer

from hf_recurrent.learning_rules.joint_optimizer import join_optimizers
from hf_recurrent.learning_rules.optimizers import frozen
from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, supports_recurrent_state
from hf_recurrent.modeling.contexts.counted_predictions import init_network_state
from hf_recurrent.planning.setting import BPTT, Setting
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.trainers.methods.truncated_bptt import next_token_loss
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.smt.smt_objective import DmtObjective
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher

_STRIDES = 2  # enough for memory: the second finds what the first one leaves


def build_steps(model: nn.Module, setting: Setting) -> "NextTokenSteps | MemorySteps":
    """The steps of a model; [`MemorySteps`] for the RNN and teacher of SMT and DMT."""
    kind = MemorySteps if isinstance(model, StudentAndTeacher) else NextTokenSteps
    return kind(model, setting)


class NextTokenSteps:
    """Steps of next-token training, by BPTT or a learning rule; each micro-batch carries its own state.

    Raises:
        ValueError: the model does not support the method.
    """

    def __init__(self, model: nn.Module, setting: Setting):
        self.model, self.setting = model, setting
        self.rule = None if setting.method == BPTT else build_learning_rule(setting.method, model)
        self.carries_state = setting.carries_state and supports_recurrent_state(model)
        self._states: list[RecurrentState | None] = [None] * setting.accumulation
        self._sensitivities: list[RecurrentState] = [{}] * setting.accumulation
        if self.carries_state:
            self._states = [init_network_state(model, setting.streams) for _ in self._states]
        if self.carries_state and self.rule is not None:
            self._sensitivities = [self.rule.init_carried(setting.streams) for _ in self._sensitivities]
        self.state_bytes, self.sensitivity_bytes = map(_nbytes, (self._states, self._sensitivities))

    def run(self, group: int, whole: bool = False) -> None:
        """Forward and backward of a micro-batch, stride by stride; only of the first strides unless it is `whole`."""
        setting, model = self.setting, self.model
        batch = _zero_block(model, setting.streams, setting.stride)
        batch["num_targets"] = torch.ones((), device=model.device)
        strides = setting.block_size // setting.stride
        strides = strides if whole else min(strides, _STRIDES)
        state = self._states[group]
        for _ in range(strides):
            with self.rule.block(self._sensitivities[group]) if self.rule else nullcontext():
                with torch.autocast(model.device.type, torch.bfloat16, enabled=setting.bfloat16):
                    loss, output = next_token_loss(model, model, batch, state)
                if state is not None:
                    state = {name: tensor.detach() for name, tensor in output.state.items()}
                loss.backward()
                del loss, output
        self._states[group] = state


class MemorySteps:
    """Steps of SMT or DMT, which carry nothing."""

    state_bytes = sensitivity_bytes = 0

    def __init__(self, model: StudentAndTeacher, setting: Setting):
        self.model, self.setting = model, setting

    def run(self, group: int, whole: bool = True) -> None:
        """Forward and backward of one micro-batch; see [`NextTokenSteps.run`]."""
        setting, model = self.setting, self.model
        # The last positions of each block: their contexts are full. A shorter rollout has its first one several times.
        anchors = torch.arange(setting.block_size - setting.anchors, setting.block_size, device=model.device)
        anchors = anchors.clamp(min=setting.first_anchor)
        inputs = _zero_block(model, setting.streams, setting.block_size)
        inputs["anchors"] = anchors.expand(setting.streams, -1).contiguous()
        if isinstance(model, DmtObjective):
            inputs["start"] = setting.first_anchor
        with torch.autocast(model.device.type, torch.bfloat16, enabled=setting.bfloat16):
            losses = model(**inputs)
        losses.total.backward()


def _zero_block(model: nn.Module, streams: int, steps: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(streams, steps, dtype=torch.long, device=model.device)
    return {
        "input_ids": ids,
        "shift_labels": torch.zeros_like(ids),
        "reset_mask": torch.zeros_like(ids).bool(),
    }


def _nbytes(states: list[RecurrentState | None]) -> int:
    return sum(tensor.nbytes for state in states if state is not None for tensor in state.values())


def build_optimizer(
    model: nn.Module, trained: list[nn.Parameter], arguments: MultiStreamTrainingArguments
) -> torch.optim.Optimizer:
    """The optimizer that training with `arguments` would use for the parameters `trained`."""
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    rates = arguments.matrix_learning_rate, arguments.table_learning_rate
    return join_optimizers(optimizer_class(trained, **options), model, arguments.matrix_optimizer, *rates)


def bytes_per_second(model: nn.Module, arguments: MultiStreamTrainingArguments, setting: Setting, steps: int) -> float:
    """The rate of one process, from the fastest of `steps` optimizer steps after a first one."""
    model = with_state(model).to(arguments.device).train()
    if setting.checkpointing:
        model.gradient_checkpointing_enable()
    seconds = []
    with frozen(*(model.frozen_modules if isinstance(model, StudentAndTeacher) else ())):
        optimizer = build_optimizer(model, [part for part in model.parameters() if part.requires_grad], arguments)
        training = build_steps(model, setting)
        for _ in range(steps + 1):
            begin = _now(model)
            for group in range(setting.accumulation):
                training.run(group, whole=True)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(_now(model) - begin)
    return setting.streams * setting.accumulation * setting.block_size / min(seconds[1:])


def _now(model: nn.Module) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
