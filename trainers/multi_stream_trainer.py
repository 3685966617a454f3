"""Truncated backpropagation through time with the state carried, on blocks and on overlapping windows (Memora, 3)."""

from hf_recurrent.trainers.methods.truncated_bptt import RollingWindowBptt
from hf_recurrent.trainers.multi_stream_arguments import RollingWindowTrainingArguments
from hf_recurrent.trainers.stream_trainer import StreamTrainer


class MultiStreamTrainer(StreamTrainer):
    """A `Trainer` on blocks of continuous streams that carries the recurrent state from block to block.

    The state is carried detached: gradients reach back one block. The loss is the mean over all targets of an
    optimizer step, so 8 streams at once, 4 × 2 accumulated, and two processes of 4 are the same training.

    Stock recurrent models (Mamba2 and the others of [`with_state`]) carry their state as ours do. Models without a
    state (stock Llama) train on the same batches, each block on its own. The regime "iid" carries no state either;
    stock models then run their own code, which knows no resets.

    A checkpoint can be resumed with another number of processes if the number of streams stays the same. `evaluate()`
    reports `eval_loss` (nats per target) and `eval_bits_per_byte` for a corpus ([`evaluate_bits_per_byte`]);
    `eval_accuracy`, `eval_exact_match` and `eval_loss` for a task ([`evaluate_task`]).

    Args:
        model: a causal language model.
        args: [`MultiStreamTrainingArguments`]; the trainer works on a copy.
        train_corpus, eval_corpus, processing_class, callbacks, optimizers, method: see [`StreamTrainer`].

    Raises:
        ValueError: see [`StreamTrainer`]; a task needs blocks of its examples' length because no state is carried; or
            a stock model would carry its state with `gradient_checkpointing`.
    """


class RollingWindowTrainer(MultiStreamTrainer):
    """A [`MultiStreamTrainer`] whose updates see each byte T / S times, in windows that start S bytes apart.

    A window starts from the state before its first byte, which the pass over the window before has reached with the
    weights of that time. Its loss is the mean over its T bytes. With T = S it is a [`MultiStreamTrainer`]. An update
    costs as much as one with blocks of T, and a forward pass over S bytes.

    Args:
        model: a causal language model with a state.
        args: [`RollingWindowTrainingArguments`].
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`StreamTrainer`].

    Raises:
        ValueError: see [`MultiStreamTrainer`], or the model has no state.
    """

    args: RollingWindowTrainingArguments
    method_class = RollingWindowBptt
