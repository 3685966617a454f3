"""Supervised Memory Training: an RNN learns single steps between memories that a teacher learns to need."""

from torch import nn
from transformers.utils import logging

from hf_recurrent.modeling.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.memory_trainer import MemoryTrainer
from hf_recurrent.trainers.smt_arguments import SmtTrainingArguments
from hf_recurrent.trainers.smt_objective import SmtObjective

logger = logging.get_logger(__name__)


class SmtTrainer(MemoryTrainer):
    """Supervised Memory Training (SMT, section 2.2): no step is ever unrolled, whatever the length.

    The teacher's encoder makes memories of contexts, its decoder predicts the future from them, and the RNN learns to
    make each memory from the one before and the next byte. Blocks of a corpus begin anywhere; those of a [`Task`] are
    its examples. The RNN's readout is the teacher's decoder, taken over whenever the RNN is evaluated or saved and at
    the end of training: its prediction from a teacher's memory then equals the teacher's of the first future byte.

    Logs hold `decoder_loss`, `dynamics_loss`, `uniformity` (0 is collapse, about -4 is uniform), and `teacher_loss`,
    the teacher's nats of the first future byte, which the RNN can reach; `bits_per_byte` is the latter in bits.
    A following [`DmtTrainer`] closes the gap between the two when the RNN runs on its own memories.

    Args:
        model: the RNN.
        teacher: its teacher, of the same memory and vocabulary, and with a decoder of the readout's shape.
        args: [`SmtTrainingArguments`].
        others: those of [`MultiStreamTrainer`].

    Raises:
        ValueError: the two do not match, or blocks are shorter than context and future; and whatever
            [`MultiStreamTrainer`] refuses.
    """

    args: SmtTrainingArguments
    predictive_loss = "teacher_loss"

    def __init__(self, model: SmtRnnForCausalLM, *others, **named_others):
        super().__init__(model, *others, **named_others)
        model.load_readout(self.teacher)
        if model.config.backbone == "gru":
            logger.warning(
                "A GRU makes the memories collapse under SMT (SMT, section 3.3): watch `uniformity`, which is then "
                "near 0, and prefer the Transformer or MLP backbone, or backpropagation through time."
            )

    def train(self, *args, **kwargs):
        """Train, and give the RNN the decoder as its readout; see [`MultiStreamTrainer.train`]."""
        output = super().train(*args, **kwargs)
        self.student.load_readout(self.teacher)
        return output

    def _build_objective(
        self, student: SmtRnnForCausalLM, teacher: SmtTeacherModel, args: SmtTrainingArguments
    ) -> SmtObjective:
        return SmtObjective(
            student,
            teacher,
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

    def _last_anchor(self, reads_task: bool) -> int:
        return self.args.block_size - (1 if reads_task else self.args.future_length)

    @property
    def trained_model(self) -> SmtRnnForCausalLM:
        """The RNN; while it trains, with the decoder as it is now for a readout."""
        if self.is_in_train:
            self.student.load_readout(self.teacher)
        return self.student
