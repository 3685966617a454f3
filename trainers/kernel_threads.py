"""Threads of a training step on a CPU that is kernels in the main: they go to the kernels, and torch has one."""

from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from hf_recurrent.kernels.thread_count import threads_for_kernels
from hf_recurrent.learning_rules.joint_optimizer import MUON
from hf_recurrent.modeling.block.training_kernels import SMALLEST_FUSED, training_module
from hf_recurrent.trainers.methods.online_rule import OnlineRule
from hf_recurrent.trainers.methods.training_method import TrainingMethod
from hf_recurrent.trainers.methods.truncated_bptt import TruncatedBptt
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments

_FUSED_UNITS = {("memora", "glru"), ("hawk", "rg_lru")}  # model type, unit


def kernel_threads(
    model: torch.nn.Module, method: TrainingMethod, args: MultiStreamTrainingArguments
) -> AbstractContextManager[None]:
    """A block in which kernels have all threads, if a step of this model and method is kernels in the main."""
    has_other_steps = args.bf16 or args.fp16 or args.torch_compile or args.matrix_optimizer == MUON
    is_fused = (
        args.device.type == "cpu"
        and not has_other_steps
        and isinstance(model, PreTrainedModel)
        and model.dtype == torch.float32
        and (model.config.model_type, getattr(model.config, "recurrent_unit", None)) in _FUSED_UNITS
        and training_module() is not None
    )
    if isinstance(method, OnlineRule):
        is_fused = is_fused and is_kernel_block(model, args.per_device_train_batch_size, args.stride)
    else:
        is_fused = is_fused and isinstance(method, TruncatedBptt)
    return threads_for_kernels() if is_fused else nullcontext()


def is_kernel_block(model: PreTrainedModel, streams: int, steps: int) -> bool:
    """True for blocks of streams and steps that are so large that kernels compute them, where those were built."""
    return streams * steps * model.config.hidden_size >= SMALLEST_FUSED and training_module() is not None
