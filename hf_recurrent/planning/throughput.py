"""Bytes per second of training, measured on this machine with a few steps on made-up blocks."""

import time

import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_recurrent.learning_rules.rules import build_learning_rule
from hf_recurrent.planning.training_memory import Setting, micro_batch, zero_carried
from hf_recurrent.stock_models.with_state import with_state


def bytes_per_second(model: PreTrainedModel, arguments: TrainingArguments, setting: Setting, steps: int) -> float:
    """The rate of one process, from the fastest of `steps` optimizer steps after a first one."""
    model = with_state(model).to(arguments.device).train()
    if setting.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    optimizer = optimizer_class(model.parameters(), **options)
    rule = None if setting.method == "bptt" else build_learning_rule(setting.method, model)
    carried = [zero_carried(model, rule, setting) for _ in range(setting.accumulation)]
    seconds = []
    for _ in range(steps + 1):
        begin = _now(model)
        for group, (state, sensitivities) in enumerate(carried):
            carried[group] = (micro_batch(model, rule, state, sensitivities, setting, None), sensitivities)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(_now(model) - begin)
    return setting.streams * setting.accumulation * setting.block_size / min(seconds[1:])


def _now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
