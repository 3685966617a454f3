"""DAgger Memory Training: the RNN runs on its own memories and is drawn back to its teacher's."""

import numpy as np
import torch
from torch import nn

from hf_recurrent.modeling.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.tasks.task import Task
from hf_recurrent.trainers.dmt_objective import DmtObjective
from hf_recurrent.trainers.memory_trainer import MemoryTrainer
from hf_recurrent.trainers.memory_windows import choose_cuts
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments


class DmtTrainer(MemoryTrainer):
    """DAgger Memory Training (SMT, section 2.3): a short phase after [`SmtTrainer`], with a small learning rate.

    The teacher is frozen. From its memory after a context (zero where an episode begins) the RNN reads on by itself,
    and its memories have to stay those that the teacher makes of the same bytes; the readout alone learns to predict
    the next byte from them.

    Logs hold `memory_loss`, `readout_loss` (nats per target) and `drift`, 1 - R² of the labelled memories;
    `bits_per_byte` is the readout's loss in bits.

    Args:
        model: the RNN, after [`SmtTrainer`].
        teacher: the teacher that it was trained with.
        args: [`DmtTrainingArguments`].
        others: those of [`MultiStreamTrainer`].

    Raises:
        ValueError: the two do not match, or blocks are shorter than context and rollout; and whatever
            [`MultiStreamTrainer`] refuses.
    """

    args: DmtTrainingArguments
    predictive_loss = "readout_loss"

    def _build_objective(
        self, student: SmtRnnForCausalLM, teacher: SmtTeacherModel, args: DmtTrainingArguments
    ) -> DmtObjective:
        return DmtObjective(student, teacher, context_length=self._context_length, gradient_steps=args.gradient_steps)

    def _frozen(self) -> list[nn.Module]:
        return [self.teacher]

    def _last_anchor(self, reads_task: bool) -> int:
        return self.args.block_size - 1

    def _model_inputs(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        start = self._first_anchor(isinstance(self.train_dataset, Task))
        return super()._model_inputs(inputs) | {"start": start}

    def _choose_cuts(self, streams: np.ndarray, positions: np.ndarray, seed: int, anchors: np.ndarray) -> np.ndarray:
        # The rollout begins where the episode does.
        start = np.full_like(anchors[:, :1], self._first_anchor(False))
        return choose_cuts(streams, positions, seed, start, 1, self.args.start_share)
