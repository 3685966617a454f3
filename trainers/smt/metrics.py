"""How far an RNN's own memories are from its teacher's, and what that costs in predictions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_recurrent.data.episode_losses import evaluation_mode
from hf_recurrent.modeling.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.modeling.recurrent_state import upcast
from hf_recurrent.trainers.smt.student_and_teacher import StudentAndTeacher
from hf_recurrent.trainers.smt.windows import episode_bounds

# The teacher's memory of a position costs a pass over its whole context: of long blocks, so many are measured.
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
    """Run the RNN over the end of each block on its own memories, and compare with the teacher at each position.

    Args:
        student, teacher: models of the same memory and vocabulary.
        input_ids, shift_labels, reset_mask: (B, T).
        start: first position that the RNN reads; its memory before is the teacher's, or zero for 0.
        context_length: Tc.
        batch_size: blocks at a time.

    Returns:
        `drift` and `one_step_drift`, 1 - R² of the RNN's memories from its own and from the teacher's memory before;
        `rollout_loss` and `teacher_loss`, nats per target of the RNN and of the teacher; `teacher_bits_per_byte`; and
        `teacher_accuracy`. Measured where something is asked, in long blocks at 64 such positions.
    """
    sums, positions = _Sums(), _positions(shift_labels, start).to(student.device)
    with evaluation_mode(student, teacher):
        for first in range(0, len(input_ids), batch_size):
            part = (
                tensor[first : first + batch_size].to(student.device)
                for tensor in (input_ids, shift_labels, reset_mask)
            )
            _add(sums, student, teacher, *part, positions=positions, start=start, context_length=context_length)
    return sums.metrics()


class _Sums:
    """Sums over positions; those of memories are per entry, (M, D), in float64."""

    def __init__(self):
        self.rows = self.targets = self.right = 0
        self.rollout_nats = self.teacher_nats = self.residual = self.one_step_residual = 0.0
        self.memory: Tensor | float = 0.0
        self.square: Tensor | float = 0.0

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


def _add(
    sums: _Sums,
    student: SmtRnnForCausalLM,
    teacher: SmtTeacherModel,
    input_ids: Tensor,
    shift_labels: Tensor,
    reset_mask: Tensor,
    positions: Tensor,
    start: int,
    context_length: int,
) -> None:
    pair = StudentAndTeacher(student, teacher)
    positions = positions.expand(len(input_ids), -1)
    starts, _ = episode_bounds(reset_mask)
    memory, previous = pair.encode_with_previous(input_ids, starts, positions, context_length)
    before = torch.full_like(positions[:, :1], start - 1)
    first = pair.encode(input_ids, starts, before, context_length)[:, 0]
    rollout = pair.roll_out(first, input_ids[:, start:], reset_mask[:, start:])
    own = rollout.gather(1, (positions - start)[..., None, None].expand_as(memory)).flatten(0, 1)
    memory, previous = memory.flatten(0, 1), previous.flatten(0, 1)
    one_step = student.update(previous, input_ids.gather(1, positions).flatten())
    labels = shift_labels.gather(1, positions).flatten()
    asked = labels.ne(IGNORE_INDEX)
    teacher_logits = teacher.decode(memory[asked], labels[asked, None])[:, 0]
    wide = memory.double()
    sums.rows += len(memory)
    sums.memory = sums.memory + wide.sum(0)
    sums.square = sums.square + wide.square().sum(0)
    sums.residual += float((own.double() - wide).square().sum())
    sums.one_step_residual += float((one_step.double() - wide).square().sum())
    sums.targets += int(asked.sum())
    sums.right += int((teacher_logits.argmax(-1) == labels[asked]).sum())
    sums.teacher_nats += float(F.cross_entropy(upcast(teacher_logits), labels[asked], reduction="sum"))
    readout = student.readout(own[asked])
    sums.rollout_nats += float(F.cross_entropy(upcast(readout), labels[asked], reduction="sum"))


def _positions(shift_labels: Tensor, start: int) -> Tensor:
    """Positions to measure at, (K,): those where something is asked, or some of them evenly apart."""
    asked = shift_labels[:, start:].ne(IGNORE_INDEX).any(0).nonzero()[:, 0] + start
    if len(asked) <= _POSITIONS:
        return asked
    return asked[torch.linspace(0, len(asked) - 1, _POSITIONS).round().long()]
