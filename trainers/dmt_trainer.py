"""DAgger Memory Training: the RNN runs on its own memories and learns to stay close to its teacher's."""

from typing import Any

import numpy as np

from hf_recurrent.trainers.memory_trainer import MemoryTrainer
from hf_recurrent.trainers.smt.dmt_objective import DmtObjective
from hf_recurrent.trainers.smt.windows import choose_cuts
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments


class DmtTrainer(MemoryTrainer):
    """DAgger Memory Training (SMT, section 2.3): a short phase after [`SmtTrainer`], with a small learning rate.

    The teacher is frozen. The RNN starts from the teacher's memory of a context (zero where an episode begins) and
    reads on by itself; its memories are trained to match the teacher's memories of the same bytes. The next-byte loss
    trains the readout only.

    Logs hold `memory_loss`, `readout_loss` (nats per target) and `drift`, 1 - R² of the labelled memories;
    `bits_per_byte` is the readout's loss in bits.

    Args:
        model: the RNN, trained by [`SmtTrainer`].
        teacher: the teacher that it was trained with.
        args: [`DmtTrainingArguments`]; the trainer works on a copy.
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`BlockTrainer`].

    Raises:
        ValueError: see [`BlockTrainer`]; or the two models do not match, or blocks are shorter than context + rollout.
    """

    args: DmtTrainingArguments
    method = "dmt"
    predictive_loss = "readout_loss"

    def _build_objective(self, args: DmtTrainingArguments) -> DmtObjective:
        return DmtObjective.from_arguments(self.student, self.teacher, args)

    def _read_settings(self) -> dict[str, Any]:
        objective = self.accelerator.unwrap_model(self.model)
        rollout = self.args.block_size - self.train_dataset.first_anchor(self._context_length)
        return super()._read_settings() | {"rollout_length": rollout, "gradient_steps": objective.gradient_steps}

    def model_inputs(self, inputs):
        return super().model_inputs(inputs) | {"start": self.train_dataset.first_anchor(self._context_length)}

    def _choose_cuts(self, streams: np.ndarray, positions: np.ndarray, anchors: np.ndarray) -> np.ndarray:
        # The rollout begins where the episode does.
        start = np.full_like(anchors[:, :1], self._context_length)
        return choose_cuts(streams, positions, self.data_seed, start, 1, self.args.start_share)
