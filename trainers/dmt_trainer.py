"""`DmtTrainer`: an RNN runs on its own memories and learns to stay close to its teacher's."""

from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.methods.memory_methods import DmtMethod, MemoryMethod
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments
from hf_recurrent.trainers.stream_trainer import StreamTrainer


class DmtTrainer(StreamTrainer):
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

    def __init__(
        self,
        model: SmtRnnForCausalLM,
        teacher: SmtTeacherModel,
        args: DmtTrainingArguments,
        *arguments,
        method: MemoryMethod | None = None,
        **options,
    ):
        super().__init__(model, args, *arguments, method=method or DmtMethod(teacher), **options)
        self.teacher = teacher
