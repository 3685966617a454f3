"""Threads of a training step on a CPU that is kernels in the main: they go to the kernels, and torch has one."""

from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

from hf_recurrent.kernels.thread_count import threads_for_kernels
from hf_recurrent.learning_rules.joint_optimizer import MUON
from hf_recurrent.modeling.block.training_kernels import training_module
from hf_recurrent.trainers.methods.training_method import TrainingMethod
from hf_recurrent.trainers.methods.truncated_bptt import TruncatedBptt
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments

_FUSED_UNITS = {"memora": "glru", "hawk": "rg_lru"}  # model type → unit


def kernel_threads(
    model: torch.nn.Module, method: TrainingMethod, args: MultiStreamTrainingArguments
) -> AbstractContextManager[None]:
    """A block in which kernels have all threads, if a step of this model and method is kernels in the main."""
    is_plain = not (args.bf16 or args.fp16 or args.torch_compile or args.matrix_optimizer == MUON)
    if (
        not is_plain
        or not isinstance(method, TruncatedBptt)
        or args.device.type != "cpu"
        or not isinstance(model, PreTrainedModel)
    ):
        return nullcontext()
    unit = getattr(model.config, "recurrent_unit", None)
    if model.dtype != torch.float32 or unit is None or _FUSED_UNITS.get(model.config.model_type) != unit:
        return nullcontext()
    return threads_for_kernels() if training_module() is not None else nullcontext()
