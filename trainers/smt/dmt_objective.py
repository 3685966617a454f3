"""Losses of one step of DAgger Memory Training: the RNN runs on its own memories (SMT, section 2.3)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.smt.losses import decoder_loss, dynamics_loss, unexplained_variance
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher
from hf_recurrent.trainers.smt.windows import episode_bounds
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments


@dataclass
class DmtLosses:
    """Scalars, all but `total` detached; drift is 1 - R² of the labelled memories of this batch."""

    total: Tensor
    memory_loss: Tensor
    readout_loss: Tensor
    drift: Tensor


class DmtObjective(StudentAndTeacher):
    """`L_dmt` of a rollout, plus the readout's next-byte loss with the gradient stopped at the memory.

    The RNN runs from `start` to the end of the block on its own memories, beginning with the teacher's memory at
    `start` - 1 (zero for `start` = 0, and where an episode begins). `L_dmt` compares its memories at the anchors with
    the teacher's.

    Args:
        student, teacher: models of the same memory and vocabulary; the teacher is not trained.
        context_length: Tc, maximum number of bytes that the teacher encodes into a memory.
        gradient_steps: steps that gradients flow back through the rollout: 1 for none, None for all.
    """

    def __init__(
        self,
        student: SmtRnnForCausalLM,
        teacher: SmtTeacherModel,
        *,
        context_length: int,
        gradient_steps: int | None = None,
    ):
        super().__init__(student, teacher)
        self.context_length, self.gradient_steps = context_length, gradient_steps

    @classmethod
    def from_arguments(
        cls, student: SmtRnnForCausalLM, teacher: SmtTeacherModel, args: DmtTrainingArguments
    ) -> "DmtObjective":
        """The objective of a run; contexts are no longer than its blocks."""
        context_length = min(args.context_length, args.block_size)
        return cls(student, teacher, context_length=context_length, gradient_steps=args.gradient_steps)

    @property
    def frozen_modules(self) -> list[nn.Module]:
        """The teacher."""
        return [self.teacher]

    def forward(
        self, input_ids: Tensor, shift_labels: Tensor, reset_mask: Tensor, anchors: Tensor, start: int
    ) -> DmtLosses:
        """Compute the losses of one batch.

        Args:
            input_ids, shift_labels, reset_mask: (B, T).
            anchors: (B, anchors), positions of at least `start` at which memories are compared.
            start: first position that the RNN reads.
        """
        starts, _ = episode_bounds(reset_mask)
        with torch.no_grad():
            memory = self.encode(input_ids, starts, anchors, self.context_length)
            first = self.encode_before(input_ids, starts, start, self.context_length)
        rollout = self.roll_out(first, input_ids, reset_mask, start, self.gradient_steps)
        offsets = (anchors - start)[..., None, None].expand(-1, -1, *memory.shape[2:])
        predicted = rollout.gather(1, offsets)
        logits = self.student.readout(rollout.detach().flatten(0, 1))
        losses = (dynamics_loss(predicted, memory), decoder_loss(logits, shift_labels[:, start:].flatten()))
        residual, total = unexplained_variance(predicted.detach().flatten(0, 1), memory.flatten(0, 1))
        return DmtLosses(sum(losses), *(loss.detach() for loss in losses), drift=residual / total.clamp(min=1e-30))
