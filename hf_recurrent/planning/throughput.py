"""Bytes per second of training, measured on this machine with a few steps on made-up blocks."""

import time

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_recurrent.learning_rules.optimizers import frozen
from hf_recurrent.planning.setting import Setting
from hf_recurrent.planning.training_steps import build_steps
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher


def bytes_per_second(model: nn.Module, arguments: TrainingArguments, setting: Setting, steps: int) -> float:
    """The rate of one process, from the fastest of `steps` optimizer steps after a first one."""
    model = with_state(model).to(arguments.device).train()
    if setting.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    seconds = []
    with frozen(*(model.frozen_modules if isinstance(model, StudentAndTeacher) else ())):
        optimizer = optimizer_class([part for part in model.parameters() if part.requires_grad], **options)
        training = build_steps(model, setting)
        for _ in range(steps + 1):
            begin = _now(model)
            for group in range(setting.accumulation):
                training.run(group, None)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(_now(model) - begin)
    return setting.streams * setting.accumulation * setting.block_size / min(seconds[1:])


def _now(model: nn.Module) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
