"""Distance of an RNN's own memories from its teacher's, and its effect on the predictions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_recurrent.data.episode_losses import evaluation_mode
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher
from hf_recurrent.trainers.smt.windows import episode_bounds

# Maximum number of positions measured in a block: each costs the teacher a pass over its whole context.
_POSITIONS = 64


@torch.inference_mode()
def measure_memories(
    student: SmtRnnForCausalLM,
    teacher: SmtTeacherModel,
    input_ids: Tensor,
    shift_labels: Tensor,
    reset_mask: Tensor,
    *,
    start: int,
    context_length: int,
    batch_size: int = 8,
) -> dict[str, float]:
    """Run the RNN on its own memories from `start` to the end of each block, and compare it with the teacher.

    Compared are the positions that have a target, at most 64 of a block.

    Args:
        student, teacher: models of the same memory and vocabulary.
        input_ids, shift_labels, reset_mask: (B, T).
        start: first position that the RNN reads, from the teacher's memory of the position before (zero for 0).
        context_length: Tc.
        batch_size: number of blocks per forward pass.

    Returns:
        `drift` and `one_step_drift`, 1 - R² of the RNN's memories computed from its own and from the teacher's
        previous memory; `rollout_loss` and `teacher_loss`, nats per target of the RNN and of the teacher;
        `teacher_bits_per_byte`; `teacher_accuracy`.
    """
    positions = _positions(shift_labels, start).to(student.device)
    sums = _Sums(StudentAndTeacher(student, teacher), start, context_length)
    with evaluation_mode(student, teacher):
        for batch in zip(*(part.split(batch_size) for part in (input_ids, shift_labels, reset_mask)), strict=True):
            sums.add(*(tensor.to(student.device) for tensor in batch), positions)
    return sums.metrics()


class _Sums:
    """Sums over positions; sums of memories have an entry for each of theirs, (Z, D), in float64."""

    def __init__(self, pair: StudentAndTeacher, start: int, context_length: int):
        self.pair, self.start, self.context_length = pair, start, context_length
        self.rows = self.targets = self.right = 0
        self.rollout_nats = self.teacher_nats = self.residual = self.one_step_residual = 0.0
        self.memory: Tensor | float = 0.0
        self.square: Tensor | float = 0.0

    def add(self, input_ids: Tensor, shift_labels: Tensor, reset_mask: Tensor, positions: Tensor) -> None:
        pair, start = self.pair, self.start
        positions = positions.expand(len(input_ids), -1)
        starts, _ = episode_bounds(reset_mask)
        memory, previous = pair.encode_with_previous(input_ids, starts, positions, self.context_length)
        first = pair.encode_before(input_ids, starts, start, self.context_length)
        rollout = pair.roll_out(first, input_ids, reset_mask, start)
        own = rollout.gather(1, (positions - start)[..., None, None].expand_as(memory)).flatten(0, 1)
        one_step = pair.update(previous, input_ids, starts, positions)
        memory = memory.flatten(0, 1)
        labels = shift_labels.gather(1, positions).flatten()
        asked = labels.ne(IGNORE_INDEX)
        labels = labels[asked]
        teacher_logits = upcast(pair.teacher.decode(memory[asked], labels[:, None])[:, 0])
        readout_logits = upcast(pair.student.readout(own[asked]))
        wide = memory.double()
        self.rows += len(memory)
        self.memory = self.memory + wide.sum(0)
        self.square = self.square + wide.square().sum(0)
        self.residual += float((own.double() - wide).square().sum())
        self.one_step_residual += float((one_step.double() - wide).square().sum())
        self.targets += len(labels)
        self.right += int((teacher_logits.argmax(-1) == labels).sum())
        self.teacher_nats += float(F.cross_entropy(teacher_logits, labels, reduction="sum"))
        self.rollout_nats += float(F.cross_entropy(readout_logits, labels, reduction="sum"))

    def metrics(self) -> dict[str, float]:
        total = float((self.square - self.memory**2 / self.rows).sum()) or math.nan
        targets = max(self.targets, 1)
        return {
            "drift": self.residual / total,
            "one_step_drift": self.one_step_residual / total,
            "rollout_loss": self.rollout_nats / targets,
            "teacher_loss": self.teacher_nats / targets,
            "teacher_bits_per_byte": self.teacher_nats / targets / math.log(2),
            "teacher_accuracy": self.right / targets,
        }


def _positions(shift_labels: Tensor, start: int) -> Tensor:
    """Sorted positions, at most `_POSITIONS`, at which some block has a target; evenly spaced if there are more."""
    asked = shift_labels[:, start:].ne(IGNORE_INDEX).any(0).nonzero()[:, 0] + start
    if len(asked) <= _POSITIONS:
        return asked
    return asked[torch.linspace(0, len(asked) - 1, _POSITIONS).round().long()]
