"""What one step of Supervised Memory Training computes: no recurrence, whatever the length (SMT, section 2.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_recurrent.modeling.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.memory_windows import episode_bounds, gather_contexts, gather_futures
from hf_recurrent.trainers.smt_losses import decoder_loss, dynamics_loss, uniformity_loss


class StudentAndTeacher(nn.Module):
    """An RNN and the teacher of its memories as one module, so that one forward pass holds all that is trained."""

    # Blocks stand for themselves: no state goes in or comes out.
    supports_recurrent_state = False

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


@dataclass
class SmtLosses:
    """Scalars, detached but for `total`; `teacher_loss` is that of the first future byte alone."""

    total: Tensor
    decoder_loss: Tensor
    dynamics_loss: Tensor
    uniformity: Tensor
    teacher_loss: Tensor


class SmtObjective(StudentAndTeacher):
    """`L_smt` = λ_dec L_dec + λ_dyn L_dyn + λ_unif L_unif at some positions of each block (SMT, equation 5).

    At an anchor a the teacher's memory m_a predicts the future of a, and the RNN predicts m_a from m_{a-1} and x_a.
    The memory before the first byte of an episode is zero, as in the RNN.

    Args:
        student, teacher: models of the same memory and vocabulary.
        context_length: Tc, bytes that a memory is made from at most.
        future_length: Tf, bytes that it predicts.
        decoder_weight, dynamics_weight, uniformity_weight: the λ.
        detached: the RNN learns from the memories without shaping them.
        uniformity_over: "tokens" or "states".
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

    def forward(self, input_ids: Tensor, shift_labels: Tensor, reset_mask: Tensor, anchors: Tensor) -> SmtLosses:
        """The losses of one batch.

        Args:
            input_ids, shift_labels, reset_mask: (B, T).
            anchors: (B, K) positions, in order.
        """
        starts, ends = episode_bounds(reset_mask)
        memory, previous = self.encode_with_previous(input_ids, starts, anchors, self.context_length)
        inputs, targets = gather_futures(input_ids, shift_labels, ends, anchors, self.future_length)
        logits = self.teacher.decode(memory.flatten(0, 1), inputs.flatten(0, 1))
        targets = targets.flatten(0, 1)
        label = memory
        if self.detached:
            label, previous = memory.detach(), previous.detach()
        predicted = self.student.update(previous.flatten(0, 1), input_ids.gather(1, anchors).flatten())
        losses = (
            decoder_loss(logits, targets),
            dynamics_loss(predicted, label.flatten(0, 1)),
            uniformity_loss(memory, self.uniformity_over) if len(memory) > 1 else memory.new_zeros(()),
        )
        total = sum(weight * loss for weight, loss in zip(self.weights, losses, strict=True))
        parts = [loss.detach() for loss in losses]
        return SmtLosses(total, *parts, teacher_loss=decoder_loss(logits[:, :1].detach(), targets[:, :1]))
