"""`MultiStreamTrainer`: truncated backpropagation through time with the state carried from block to block."""

from transformers import PreTrainedModel

from hf_recurrent.trainers.methods.training_method import TrainingMethod
from hf_recurrent.trainers.methods.truncated_bptt import TruncatedBptt
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
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
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`StreamTrainer`].
        method: by default [`TruncatedBptt`].

    Raises:
        ValueError: see [`StreamTrainer`]; a task needs blocks of its examples' length because no state is carried; or
            a stock model would carry its state with `gradient_checkpointing`.
    """

    method_class: type[TrainingMethod] = TruncatedBptt

    def __init__(
        self,
        model: PreTrainedModel,
        args: MultiStreamTrainingArguments,
        *arguments,
        method: TrainingMethod | None = None,
        **options,
    ):
        super().__init__(model, args, *arguments, method=method or self.method_class(), **options)
