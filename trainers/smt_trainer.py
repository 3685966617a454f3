"""Supervised Memory Training: an RNN learns single steps between memories that a teacher learns to need."""

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.utils import logging

from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.modeling.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.memory_trainer import MemoryTrainer
from hf_recurrent.trainers.smt.smt_objective import SmtObjective
from hf_recurrent.trainers.smt_arguments import SmtTrainingArguments

logger = logging.get_logger(__name__)


class SmtTrainer(MemoryTrainer):
    """Supervised Memory Training (SMT, section 2.2): no step is ever unrolled, whatever the length.

    The teacher's encoder makes memories of contexts, its decoder predicts the future from them, and the RNN learns to
    make each memory from the one before and the next byte. Blocks of a corpus begin anywhere; those of a task are its
    examples. The RNN's readout is the teacher's decoder ([`sync_readout`]): its prediction from a teacher's memory
    equals the teacher's of the first future byte.

    Logs hold `decoder_loss`, `dynamics_loss`, `uniformity` (0 is collapse, about -4 is uniform), and `teacher_loss`,
    the teacher's nats of the first future byte, which the RNN can reach; `bits_per_byte` is the latter in bits.
    A following [`DmtTrainer`] closes the gap between the two when the RNN runs on its own memories.

    Args:
        model: the RNN.
        teacher: its teacher, of the same memory and vocabulary, and with a decoder of the readout's shape.
        args: [`SmtTrainingArguments`]; the trainer works on a copy.
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`MultiStreamTrainer`].

    Raises:
        ValueError: the two do not match, or blocks are shorter than context and future; and the errors of
            [`MultiStreamTrainer`].
    """

    args: SmtTrainingArguments
    predictive_loss = "teacher_loss"

    def __init__(
        self,
        model: SmtRnnForCausalLM,
        teacher: SmtTeacherModel,
        args: SmtTrainingArguments,
        train_corpus: EpisodeSource | None = None,
        eval_corpus: EpisodeSource | dict[str, EpisodeSource] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        super().__init__(model, teacher, args, train_corpus, eval_corpus, processing_class, callbacks, optimizers)
        self.sync_readout()
        if model.config.backbone == "gru":
            logger.warning(
                "A GRU makes the memories collapse under SMT (SMT, section 3.3): watch `uniformity`, which is then "
                "near 0, and prefer the Transformer or MLP backbone, or backpropagation through time."
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, trial=None, ignore_keys_for_eval=None):
        """Train, and give the RNN the decoder as its readout; see [`RecurrentTrainer.train`]."""
        output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        self.sync_readout()
        return output

    def sync_readout(self) -> None:
        """Copy the teacher's decoder to the RNN's readout."""
        self.student.load_readout(self.teacher)

    def sync_trained_model(self) -> None:
        # Afterwards the readout may be DMT's.
        if self.is_in_train:
            self.sync_readout()

    def _build_objective(self, args: SmtTrainingArguments) -> SmtObjective:
        return SmtObjective(
            self.student,
            self.teacher,
            context_length=self._context_length,
            future_length=min(args.future_length, args.block_size),
            decoder_weight=args.decoder_weight,
            dynamics_weight=args.dynamics_weight,
            uniformity_weight=args.uniformity_weight,
            detached=args.detached,
            uniformity_over=args.uniformity_over,
        )

    def _frozen(self) -> list[nn.Module]:
        return [self.student.model.decoder, self.student.lm_head]

    def _last_anchor(self, first: int) -> int:
        # Blocks that begin with an episode end with it: every position has its future.
        return self.args.block_size - (self.args.future_length if first else 1)
