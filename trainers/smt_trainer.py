"""Supervised Memory Training: an RNN learns single steps between the memories of a teacher."""

from typing import Any

from transformers.utils import logging

from hf_recurrent.trainers.memory_trainer import MemoryTrainer
from hf_recurrent.trainers.smt.smt_objective import SmtObjective
from hf_recurrent.trainers.smt_arguments import SmtTrainingArguments

logger = logging.get_logger(__name__)


class SmtTrainer(MemoryTrainer):
    """Supervised Memory Training (SMT, section 2.2): trains an RNN without unrolling it over time.

    The teacher's encoder turns contexts into memories, its decoder predicts the future from a memory, and the RNN
    learns to compute each memory from the previous one and the next byte. Blocks of a corpus begin anywhere; those of
    a task are its examples. The RNN's readout is a copy of the teacher's decoder ([`sync_readout`]), so from a
    teacher's memory both predict the same next byte.

    Logs hold `decoder_loss`, `dynamics_loss`, `uniformity` (0: memories have collapsed; about -4: uniform) and
    `teacher_loss`, the teacher's nats of the next byte, which the RNN can reach; `bits_per_byte` is `teacher_loss` in
    bits. A following [`DmtTrainer`] reduces the gap that opens when the RNN runs on its own memories.

    Args:
        model: the RNN.
        teacher: its teacher, with the same memory, vocabulary and decoder shape.
        args: [`SmtTrainingArguments`]; the trainer works on a copy.
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`BlockTrainer`].

    Raises:
        ValueError: see [`BlockTrainer`]; or the two models do not match, or blocks are shorter than context + future.
    """

    args: SmtTrainingArguments
    method = "smt"
    predictive_loss = "teacher_loss"

    def _build_objective(self, args: SmtTrainingArguments) -> SmtObjective:
        self.sync_readout()
        if self.student.config.backbone == "gru":
            logger.warning(
                "`backbone` is 'gru'; memories collapse when a GRU is trained by SMT (SMT, section 3.3). Watch "
                "`uniformity` (near 0: collapsed), or use the Transformer or MLP backbone."
            )
        return SmtObjective.from_arguments(self.student, self.teacher, args)

    def _finish_model(self) -> None:
        self.sync_readout()

    def _read_settings(self) -> dict[str, Any]:
        objective = self.accelerator.unwrap_model(self.model)
        weights = dict(zip(("decoder_weight", "dynamics_weight", "uniformity_weight"), objective.weights, strict=True))
        return (
            super()._read_settings()
            | weights
            | {
                "future_length": objective.future_length,
                "detached": objective.detached,
                "uniformity_over": objective.uniformity_over,
            }
        )

    def sync_readout(self) -> None:
        """Copy the teacher's decoder to the RNN's readout."""
        self.student.load_readout(self.teacher)

    def sync_trained_model(self) -> None:
        if self.is_in_train:  # after training, the readout may be DMT's
            self.sync_readout()
