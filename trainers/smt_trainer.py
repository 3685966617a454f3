"""`SmtTrainer` and `DmtTrainer`: an RNN learns from the memories of a teacher (SMT, section 2)."""

from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.methods.memory_methods import DmtMethod, MemoryMethod, SmtMethod
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments, MemoryTrainingArguments, SmtTrainingArguments
from hf_recurrent.trainers.stream_trainer import StreamTrainer


class MemoryTrainer(StreamTrainer):
    """Base class of [`SmtTrainer`] and [`DmtTrainer`]: a [`StreamTrainer`] of an RNN with a teacher."""

    method_class: type[MemoryMethod]

    def __init__(
        self,
        model: SmtRnnForCausalLM,
        teacher: SmtTeacherModel,
        args: MemoryTrainingArguments,
        *arguments,
        method: MemoryMethod | None = None,
        **options,
    ):
        super().__init__(model, args, *arguments, method=method or self.method_class(teacher), **options)
        self.teacher = teacher


class SmtTrainer(MemoryTrainer):
    """Supervised Memory Training (SMT, section 2.2): trains an RNN without unrolling it over time.

    The teacher's encoder turns contexts into memories, its decoder predicts the future from a memory, and the RNN
    learns to compute each memory from the previous one and the next byte. Blocks of a corpus begin anywhere; for a
    task they are its examples. The RNN's readout is a copy of the teacher's decoder, so from a teacher's memory both
    predict the same next byte.

    Logs hold `decoder_loss`, `dynamics_loss`, `uniformity` (0: memories have collapsed; about -4: uniform) and
    `teacher_loss`, the teacher's nats of the next byte, which the RNN can reach; `bits_per_byte` is `teacher_loss` in
    bits. A following [`DmtTrainer`] reduces the gap that opens when the RNN runs on its own memories.

    Args:
        model: the RNN.
        teacher: its teacher, with the same memory, vocabulary and decoder shape.
        args: [`SmtTrainingArguments`]; the trainer works on a copy.
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`StreamTrainer`].
        method: by default [`SmtMethod`] with the teacher.

    Raises:
        ValueError: see [`StreamTrainer`]; or the two models do not match, or blocks are shorter than context + future.
    """

    args: SmtTrainingArguments
    method_class = SmtMethod


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
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`StreamTrainer`].
        method: by default [`DmtMethod`] with the teacher.

    Raises:
        ValueError: see [`StreamTrainer`]; or the models do not match, or blocks are shorter than context + rollout.
    """

    args: DmtTrainingArguments
    method_class = DmtMethod
