"""An RNN and the teacher of its memories as one module: how memories are made, and how the RNN runs on its own."""

import torch
from torch import Tensor, nn

from hf_recurrent.modeling.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.smt.windows import gather_contexts


class StudentAndTeacher(nn.Module):
    """An RNN and the teacher of its memories as one module, so that one forward pass holds all that is trained."""

    def __init__(self, student: SmtRnnForCausalLM, teacher: SmtTeacherModel):
        super().__init__()
        self.student, self.teacher = student, teacher

    @property
    def config(self):
        """The RNN's: it is what training is for."""
        return self.student.config

    @property
    def device(self) -> torch.device:
        return self.student.device

    def num_parameters(self, **options: bool) -> int:
        """Those of both; the options are those of `PreTrainedModel.num_parameters`."""
        return self.student.num_parameters(**options) + self.teacher.num_parameters(**options)

    def parameters_without_weight_decay(self) -> set[str]:
        return {
            f"{part}.{name}"
            for part in ("student", "teacher")
            if hasattr(module := getattr(self, part), "parameters_without_weight_decay")
            for name in module.parameters_without_weight_decay()
        }

    def gradient_checkpointing_enable(self, *args, **kwargs) -> None:
        """Of both; the older name of [`activation_checkpointing_enable`]."""
        for module in (self.student, self.teacher):
            module.gradient_checkpointing_enable(*args, **kwargs)

    def activation_checkpointing_enable(self, *args, **kwargs) -> None:
        """Of both, see `PreTrainedModel.activation_checkpointing_enable`."""
        for module in (self.student, self.teacher):
            module.activation_checkpointing_enable(*args, **kwargs)

    def encode(self, input_ids: Tensor, starts: Tensor, positions: Tensor, context_length: int) -> Tensor:
        """The teacher's memories (B, K, M, D) of `positions` (B, K); zero where there is no byte yet."""
        ids, mask = gather_contexts(input_ids, starts, positions, context_length)
        memory = self.teacher.encode(ids.flatten(0, 1), mask.flatten(0, 1)).unflatten(0, positions.shape)
        return memory.masked_fill(~mask.any(-1)[..., None, None], 0)

    def encode_with_previous(
        self, input_ids: Tensor, starts: Tensor, positions: Tensor, context_length: int
    ) -> tuple[Tensor, Tensor]:
        """The teacher's memories of `positions` and those before, zero where an episode begins; both (B, K, M, D)."""
        if positions.shape[1] == input_ids.shape[1]:
            memory = self.encode(input_ids, starts, positions, context_length)
            previous = torch.cat([torch.zeros_like(memory[:, :1]), memory[:, :-1]], 1)
        else:
            both = torch.cat([positions, positions - 1], 1)
            memory, previous = self.encode(input_ids, starts, both, context_length).chunk(2, 1)
        begins = starts.gather(1, positions) == positions
        return memory, previous.masked_fill(begins[..., None, None], 0)

    def roll_out(
        self, memory: Tensor, input_ids: Tensor, reset_mask: Tensor, gradient_steps: int | None = None
    ) -> Tensor:
        """The RNN's own memories after each byte, (B, T, M, D), from the memory (B, M, D) before the first.

        Args:
            gradient_steps: steps that gradients reach back: 1 for none, None for all.
        """
        size, memories = gradient_steps or input_ids.shape[1], []
        for ids, resets in zip(input_ids.split(size, 1), reset_mask.split(size, 1), strict=True):
            memories.append(self.student.unroll(memory, ids, resets))
            memory = memories[-1][:, -1].detach()
        return torch.cat(memories, 1)
