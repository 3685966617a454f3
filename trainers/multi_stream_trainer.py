"""Multi-stream training: truncated backpropagation through time with the state carried from block to block."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from hf_recurrent.data.episode_source import EpisodeSource
from hf_recurrent.modeling.recurrent_state import RecurrentState, detach_state, supports_recurrent_state
from hf_recurrent.trainers.block_trainer import BlockTrainer
from hf_recurrent.trainers.carried_state import CarriedState
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.next_token_loss import next_token_loss


class MultiStreamTrainer(BlockTrainer):
    """A `Trainer` whose batches are blocks of continuous streams, with the recurrent state carried between them.

    The state is carried detached: gradients reach back one block. An accumulation step is another group of streams
    with a state of its own, and the loss is the mean over all targets of a step, so that 8 × 1, 4 × 2 accumulated and
    two processes of 4 are the same training.

    Models without `supports_recurrent_state` (stock Llama, Mamba2) are trained on the same batches with nothing to
    carry: each block is all they see. The regime "iid" carries nothing either.

    A checkpoint ([`RecurrentTrainer`]) can be continued with another number of processes as long as the streams are
    the same. `evaluate()` on a corpus reports `eval_loss` (nats per target) and `eval_bits_per_byte`
    ([`evaluate_bits_per_byte`]); on a task `eval_accuracy`, `eval_exact_match` and `eval_loss` ([`evaluate_task`]),
    whose logs hold the `accuracy` of the answers since the last one.

    Args:
        model: a causal language model over the token ids of the source.
        args: [`MultiStreamTrainingArguments`]; the trainer works on a copy.
        train_corpus: episodes to train on: a corpus, a task or any other [`EpisodeSource`].
        eval_corpus: held-out episodes, or a dictionary of several sources by name.
        processing_class: the tokenizer; saved with the model, and needed for samples.
        callbacks: further callbacks.
        optimizers: an optimizer and a schedule of your own.

    Raises:
        ValueError: a source is empty or has more token ids than the model's vocabulary, a block is longer than the
            model's positions, there is no tokenizer to print samples with, or a task is endless and nothing says how
            long to train, or has not one block per example where that is needed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: MultiStreamTrainingArguments,
        train_corpus: EpisodeSource | None = None,
        eval_corpus: EpisodeSource | dict[str, EpisodeSource] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        carries_state = supports_recurrent_state(model) and args.regime == "multi_stream"
        if train_corpus is not None:
            train_corpus.check_training(args, carries_state)
        super().__init__(model, args, train_corpus, eval_corpus, processing_class, callbacks, optimizers)
        if carries_state:
            self.carried = CarriedState(self.model.init_state, self.args.device)
        self._final_state: RecurrentState | None = None

    def learn_block(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        """One micro-batch: the state of its group of streams goes in, and the state after it is kept."""
        if self.carried is None:
            return super().learn_block(model, inputs, num_items_in_batch)
        group = int(inputs["stream_indices"][0])
        state = self.carried.get(group, len(inputs["stream_indices"]))
        loss = super().learn_block(model, inputs | {"state": state}, num_items_in_batch)
        self.carried.set(group, self._final_state)
        self._final_state = None
        return loss

    def model_inputs(self, inputs):
        return super().model_inputs(inputs) | ({} if self.carried is None else {"state": inputs["state"]})

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Nats of a micro-batch / targets of the whole step; keeps the final state, detached."""
        loss, outputs = next_token_loss(
            model, self.model, inputs, num_items_in_batch, returns_state=self.carried is not None
        )
        if self.carried is not None:
            self._final_state = detach_state(outputs.state)
        if model.training:
            self.count_training(outputs.logits, inputs["shift_labels"])
        # Processes average their gradients, but each has already divided by the targets of all.
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss
