"""`OnlineTrainer`: every block of a stream is read once, with gradients through the past beyond the block."""

from hf_recurrent.trainers.methods.online_rule import OnlineRule
from hf_recurrent.trainers.online_arguments import OnlineTrainingArguments
from hf_recurrent.trainers.stream_trainer import StreamTrainer


class OnlineTrainer(StreamTrainer):
    """Training with a learning rule whose gradients may reach back beyond the block.

    An optimizer step reads `args.block_size` bytes of each stream, in strides of `args.stride` with the weights
    frozen. With `method="rtrl"` in the arguments, every recurrent unit learns from its whole past
    ([`SensitivityEngine`]): the derivative of the state with respect to every weight is carried and saved like the
    state, and is zero where an episode begins. In everything else the trainer works like [`MultiStreamTrainer`].

    Args:
        model: a recurrent language model. `rtrl` and `snap1` need this package's recurrent units, and `rtrl` units
            that do not mix channels.
        args: [`OnlineTrainingArguments`]; the trainer works on a copy.
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`StreamTrainer`].
        method: by default [`OnlineRule`], which is the rule of `args.method`.

    Raises:
        ValueError: see [`StreamTrainer`]; or the model carries no state, or does not support `args.method`.
    """

    args: OnlineTrainingArguments
    method_class = OnlineRule
