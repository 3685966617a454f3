"""Losses of one step of Supervised Memory Training, computed without recurrence (SMT, section 2.2)."""

from dataclasses import dataclass

from torch import Tensor, nn

from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.smt.losses import decoder_loss, dynamics_loss, uniformity_loss
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher
from hf_recurrent.trainers.smt.windows import episode_bounds, gather_futures
from hf_recurrent.trainers.smt_arguments import SmtTrainingArguments


@dataclass
class SmtLosses:
    """Scalars, all but `total` detached; `teacher_loss` is the decoder loss of the first future byte."""

    total: Tensor
    decoder_loss: Tensor
    dynamics_loss: Tensor
    uniformity: Tensor
    teacher_loss: Tensor


class SmtObjective(StudentAndTeacher):
    """`L_smt` = λ_dec L_dec + λ_dyn L_dyn + λ_unif L_unif at the anchors of each block (SMT, equation 5).

    At an anchor a, the teacher's memory m_a predicts the future of a, and the RNN predicts m_a from m_{a-1} and x_a.
    The memory before the first byte of an episode is zero.

    Args:
        student, teacher: models of the same memory and vocabulary.
        context_length: Tc, maximum number of bytes that the teacher encodes into a memory.
        future_length: Tf, number of bytes that a memory predicts.
        decoder_weight, dynamics_weight, uniformity_weight: λ_dec, λ_dyn and λ_unif.
        detached: stop the gradient of `L_dyn` at the teacher's memories.
        uniformity_over: "tokens" or "states", see [`uniformity_loss`].
    """

    def __init__(
        self,
        student: SmtRnnForCausalLM,
        teacher: SmtTeacherModel,
        *,
        context_length: int,
        future_length: int,
        decoder_weight: float = 1.0,
        dynamics_weight: float = 0.1,
        uniformity_weight: float = 0.001,
        detached: bool = False,
        uniformity_over: str = "tokens",
    ):
        super().__init__(student, teacher)
        self.context_length, self.future_length = context_length, future_length
        self.weights = (decoder_weight, dynamics_weight, uniformity_weight)
        self.detached, self.uniformity_over = detached, uniformity_over

    @classmethod
    def from_arguments(
        cls, student: SmtRnnForCausalLM, teacher: SmtTeacherModel, args: SmtTrainingArguments
    ) -> "SmtObjective":
        """The objective of a run; contexts and futures are no longer than its blocks."""
        return cls(
            student,
            teacher,
            context_length=min(args.context_length, args.block_size),
            future_length=min(args.future_length, args.block_size),
            decoder_weight=args.decoder_weight,
            dynamics_weight=args.dynamics_weight,
            uniformity_weight=args.uniformity_weight,
            detached=args.detached,
            uniformity_over=args.uniformity_over,
        )

    @property
    def frozen_modules(self) -> list[nn.Module]:
        """The readout of the RNN, which is a copy of the teacher's decoder."""
        return [self.student.model.decoder, self.student.lm_head]

    def forward(self, input_ids: Tensor, shift_labels: Tensor, reset_mask: Tensor, anchors: Tensor) -> SmtLosses:
        """Compute the losses of one batch.

        Args:
            input_ids, shift_labels, reset_mask: (B, T).
            anchors: (B, anchors) positions, sorted.
        """
        starts, ends = episode_bounds(reset_mask)
        memory, previous = self.encode_with_previous(input_ids, starts, anchors, self.context_length)
        inputs, targets = gather_futures(input_ids, shift_labels, ends, anchors, self.future_length)
        logits = self.teacher.decode(memory.flatten(0, 1), inputs.flatten(0, 1))
        targets = targets.flatten(0, 1)
        label = memory
        if self.detached:
            label, previous = memory.detach(), previous.detach()
        predicted = self.update(previous, input_ids, starts, anchors)
        losses = (
            decoder_loss(logits, targets),
            dynamics_loss(predicted, label.flatten(0, 1)),
            uniformity_loss(memory, self.uniformity_over) if len(memory) > 1 else memory.new_zeros(()),
        )
        total = sum(weight * loss for weight, loss in zip(self.weights, losses, strict=True))
        parts = [loss.detach() for loss in losses]
        return SmtLosses(total, *parts, teacher_loss=decoder_loss(logits[:, :1].detach(), targets[:, :1]))
