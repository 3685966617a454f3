"""Losses of one step of Supervised Memory Training (SMT, section 2.2), and of a rollout of DMT (section 2.3)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher
from hf_recurrent.trainers.smt.windows import episode_bounds, gather_futures


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

    settings = ("context_length", "gradient_steps")

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

    @property
    def frozen_modules(self) -> list[nn.Module]:
        """The teacher."""
        return [self.teacher]

    def forward(
        self, input_ids: Tensor, shift_labels: Tensor, reset_mask: Tensor, anchors: Tensor, start: int
    ) -> DmtLosses:
        """The losses of one batch (B, T), at anchors (B, anchors) from `start` on, the first position that is read."""
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


def decoder_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """`L_dec`: mean cross-entropy of the decoder's predictions (…, Tf, V) of labels (…, Tf); -100 is ignored."""
    count = labels.ne(IGNORE_INDEX).sum().clamp(min=1)
    return F.cross_entropy(upcast(logits).flatten(0, -2), labels.flatten(), reduction="sum") / count


def dynamics_loss(predicted: Tensor, memory: Tensor) -> Tensor:
    """`L_dyn`, and in a rollout `L_dmt`: mean squared error of memories, both (…, Z, D)."""
    return F.mse_loss(upcast(predicted), upcast(memory))


def uniformity_loss(memory: Tensor, over: str = "tokens") -> Tensor:
    """`L_unif` = log E exp(-2‖m_a - m_b‖²) over pairs of different sequences (Wang and Isola, 2020).

    Memories are normalized to length 1. 0 means that they have collapsed; about -4, that they are uniform.

    Args:
        memory: (B, anchors, Z, D); memories of the same anchor in different sequences are compared.
        over: "tokens" compares each of the Z tokens, "states" the whole memory as one vector.

    Raises:
        ValueError: there are fewer than two sequences.
    """
    rows = len(memory)
    if rows < 2:
        raise ValueError(f"`memory` holds {rows} sequence; it must hold at least 2 to compare.")
    if over == "states":
        memory = memory.flatten(2).unsqueeze(2)
    points = F.normalize(upcast(memory), dim=-1).flatten(1, 2).transpose(0, 1)  # (anchors · Z, B, D)
    squares = 2 - 2 * points @ points.transpose(1, 2)
    first, second = torch.triu_indices(rows, rows, offset=1, device=memory.device)
    pairs = -2 * squares[:, first, second]
    return pairs.flatten().logsumexp(0) - torch.tensor(pairs.numel(), dtype=pairs.dtype).log()


def unexplained_variance(predicted: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Residual and total sum of squares of memories (B, Z, D); their ratio is the drift 1 - R².

    The mean is taken over B, separately for every entry of the memory.
    """
    memory, predicted = upcast(memory), upcast(predicted)
    return (predicted - memory).square().sum(), (memory - memory.mean(0)).square().sum()


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

    settings = (
        "context_length", "future_length", "decoder_weight", "dynamics_weight", "uniformity_weight", "detached",
        "uniformity_over",
    )  # fmt: skip

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

    @property
    def frozen_modules(self) -> list[nn.Module]:
        """The readout of the RNN, which is a copy of the teacher's decoder."""
        return [self.student.model.decoder, self.student.lm_head]

    def forward(self, input_ids: Tensor, shift_labels: Tensor, reset_mask: Tensor, anchors: Tensor) -> SmtLosses:
        """The losses of one batch (B, T), at sorted anchors (B, anchors)."""
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
