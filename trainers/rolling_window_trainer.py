"""`RollingWindowTrainer`: multi-stream training on windows of T bytes that move on by S ≤ T (Memora, section 3)."""

from hf_recurrent.trainers.methods.truncated_bptt import RollingWindowBptt
from hf_recurrent.trainers.multi_stream_trainer import MultiStreamTrainer
from hf_recurrent.trainers.rolling_window_arguments import RollingWindowTrainingArguments


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
