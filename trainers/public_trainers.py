"""The public trainers: a [`StreamTrainer`] each, with its arguments and its method."""

from hf_recurrent.modeling.smt.modeling_smt_rnn import SmtRnnForCausalLM
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.trainers.methods.memory_methods import DmtMethod, MemoryMethod, SmtMethod
from hf_recurrent.trainers.methods.online_rule import OnlineRule
from hf_recurrent.trainers.methods.truncated_bptt import RollingWindowBptt
from hf_recurrent.trainers.multi_stream_arguments import RollingWindowTrainingArguments
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments, MemoryTrainingArguments, SmtTrainingArguments
from hf_recurrent.trainers.stream_trainer import StreamTrainer


class MultiStreamTrainer(StreamTrainer):
    """A `Trainer` on blocks of continuous streams that carries the recurrent state from block to block.

    The state is carried detached: gradients reach back one block (Memora, section 3). The loss is the mean over all
    targets of an optimizer step: 8 streams at once, 4 × 2 accumulated, and two processes of 4 are the same training.

    Stock recurrent models (Mamba2 and the others of [`with_state`]) carry their state as ours do. Models without a
    state (stock Llama) train on the same batches, each block on its own. The regime "iid" carries no state either;
    stock models then run their own code, which knows no resets.

    A checkpoint can be resumed with another number of processes if the number of streams stays the same. `evaluate()`
    reports `eval_loss` (nats per target) and `eval_bits_per_byte` for a corpus ([`evaluate_bits_per_byte`]);
    `eval_accuracy`, `eval_exact_match` and `eval_loss` for a task ([`evaluate_task`]).

    The arguments are [`StreamTrainer`]'s.

    Raises:
        ValueError: see [`StreamTrainer`]; a task needs blocks of its examples' length because no state is carried; or
            a stock model would carry its state with `gradient_checkpointing`.
    """


class RollingWindowTrainer(MultiStreamTrainer):
    """A [`MultiStreamTrainer`] whose updates see each byte T / S times, in windows that start S bytes apart.

    A window starts from the state before its first byte, which the pass over the window before has reached with the
    weights of that time. Its loss is the mean over its T bytes. With T = S it is a [`MultiStreamTrainer`]. An update
    costs as much as one with blocks of T, and a forward pass over S bytes.

    Raises:
        ValueError: see [`MultiStreamTrainer`], or the model has no state.
    """

    args: RollingWindowTrainingArguments
    method_class = RollingWindowBptt


class OnlineTrainer(StreamTrainer):
    """Training with a learning rule whose gradients may reach back beyond the block; a block is read once.

    An optimizer step reads `args.block_size` bytes of each stream, in strides of `args.stride` with the weights
    frozen. With `method="rtrl"` in the arguments, every recurrent unit learns from its whole past
    ([`SensitivityEngine`]): the derivative of the state with respect to every weight is carried and saved like the
    state, and is zero where an episode begins. In everything else the trainer works like [`MultiStreamTrainer`].

    The arguments are [`StreamTrainer`]'s. The model is recurrent; `rtrl` and `snap1` need this package's units,
    and `rtrl` units that do not mix channels.

    Raises:
        ValueError: see [`StreamTrainer`]; or the model carries no state, or does not support `args.method`.
    """

    args: OnlineTrainingArguments
    method_class = OnlineRule


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

    The arguments are [`StreamTrainer`]'s, and `teacher`, of the same memory, vocabulary and decoder shape.

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

    The arguments are [`StreamTrainer`]'s, and `teacher`, the model that the RNN was trained with.

    Raises:
        ValueError: see [`StreamTrainer`]; or the models do not match, or blocks are shorter than context + rollout.
    """

    args: DmtTrainingArguments
    method_class = DmtMethod
