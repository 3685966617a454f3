"""A program of a compiled kernel that is recorded from a model, and when it may run instead of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hf_recurrent.learning_rules.traced_unit import shadowed
from hf_recurrent.modeling.contexts.ngram_embedding import dense_bytes
from hf_recurrent.modeling.step.module_watch import ModuleWatch

try:
    from hf_recurrent.kernels import block_cpu
except ImportError:
    block_cpu = None

_MODULE_HOOKS = attrgetter("_backward_hooks", "_backward_pre_hooks")
_ROOT_HOOKS = attrgetter("_forward_hooks", "_forward_pre_hooks")
_PARAMETER_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
# Larger weights are read faster by several threads, and the kernel is one.
_MOST_SHARED_BYTES = 1 << 26


class Uncompilable(Exception):
    """The kernel cannot compute what a program is asked for; the text says why."""


class CompiledProgram:
    """A program for a model as it is now; it reads the weights where they are, so they may change in place.

    Call [`is_current`] and [`is_observed`] before it runs. An [`Uncompilable`] says why there is none for this model.
    """

    def __init__(self, model: PreTrainedModel):
        if block_cpu is None:
            raise Uncompilable("the kernel was not built when hf-recurrent was installed")
        self.model, self.dtype = model, model.dtype
        self.parameters = dict(model.named_parameters())
        if not block_cpu.is_supported(self.dtype) or model.device.type != "cpu":
            raise Uncompilable(f"the model is {str(self.dtype).removeprefix('torch.')} on {model.device}")
        self.bytes_read = dense_bytes(model)
        self.watch = ModuleWatch(model)
        self.trained = self._trained()
        self.modules = list(model.modules())
        if self.watch.overridden:
            raise Uncompilable("the model has hooks, replaced methods or tensors of other kinds")

    def is_current(self) -> bool:
        """True if the model is as it was when the program was recorded; weights may have other values."""
        return self.watch.unchanged() and self._trained() == self.trained

    def is_observed(self) -> bool:
        """True while hooks or modes observe the operations, or several threads are faster."""
        return bool(
            any(_ROOT_HOOKS(self.model))
            or any(map(any, map(_MODULE_HOOKS, self.modules)))
            or any(map(any, map(_PARAMETER_HOOKS, self.parameters.values())))
            or torch.is_autocast_enabled("cpu")
            or torch._C._len_torch_dispatch_stack()
            or (torch.get_num_threads() > 2 and self.bytes_read > _MOST_SHARED_BYTES)
        )

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self.parameters.values()]

    def _forward(self, ids: torch.Tensor, **arguments: Any) -> ModelOutput:
        """The model's output for recorded ids, whose values nothing may look at."""
        backbone = getattr(self.model, "model", None)
        if getattr(backbone, "embed_ngrams", None) is None:
            return self.model(inputs_embeds=self.model.get_input_embeddings()(ids), **arguments)
        embed = backbone.embed_inputs
        with shadowed(backbone, embed_inputs=lambda _, *others: embed(ids, *others)):
            return self.model(torch.zeros(ids.shape, dtype=torch.long), **arguments)

    @staticmethod
    @contextmanager
    def _recording() -> Iterator[None]:
        """Context in which the program is recorded: what the kernel cannot do becomes [`Uncompilable`]."""
        try:
            with torch.inference_mode(False):
                yield
        except block_cpu.UnsupportedOp as error:
            raise Uncompilable(f"unsupported operator: {str(error).rstrip('.')}") from error
        except block_cpu.UnreadableTensor as error:
            raise Uncompilable(f"the kernel cannot read a weight: {str(error).rstrip('.')}") from error
