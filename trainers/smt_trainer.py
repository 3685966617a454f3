"""`SmtTrainer`: an RNN learns single steps between the memories of a teacher."""

from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.methods.memory_methods import MemoryMethod, SmtMethod
from hf_recurrent.trainers.smt_arguments import SmtTrainingArguments
from hf_recurrent.trainers.stream_trainer import StreamTrainer


class SmtTrainer(StreamTrainer):
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

    def __init__(
        self,
        model: SmtRnnForCausalLM,
        teacher: SmtTeacherModel,
        args: SmtTrainingArguments,
        *arguments,
        method: MemoryMethod | None = None,
        **options,
    ):
        super().__init__(model, args, *arguments, method=method or SmtMethod(teacher), **options)
        self.teacher = teacher
