"""Multi-stream training: truncated backpropagation through time with the state carried from block to block."""

import torch
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_state import RecurrentState, detach_state, supports_recurrent_state
from hf_recurrent.stock_models.stock_model import CHECKPOINTING_ERROR, StockModelWithState
from hf_recurrent.stock_models.with_state import with_state
from hf_recurrent.trainers.block_trainer import BlockTrainer
from hf_recurrent.trainers.carried_state import CarriedState
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments
from hf_recurrent.trainers.next_token_loss import next_token_loss


class MultiStreamTrainer(BlockTrainer):
    """A `Trainer` on blocks of continuous streams that carries the recurrent state from block to block.

    The state is carried detached: gradients reach back one block. The loss is the mean over all targets of an
    optimizer step, so 8 streams at once, 4 × 2 accumulated, and two processes of 4 are the same training.

    Stock recurrent models (Mamba2 and the others of [`with_state`]) carry their state as ours do. Models without a
    state (stock Llama) train on the same batches, each block on its own. The regime "iid" carries no state either;
    stock models then run their own code, which knows no resets.

    A checkpoint ([`RecurrentTrainer`]) can be resumed with another number of processes if the number of streams stays
    the same. `evaluate()` reports `eval_loss` (nats per target) and `eval_bits_per_byte` for a corpus
    ([`evaluate_bits_per_byte`]); `eval_accuracy`, `eval_exact_match` and `eval_loss` for a task ([`evaluate_task`]).

    Args:
        model: a causal language model.
        args: [`MultiStreamTrainingArguments`]; the trainer works on a copy.
        train_corpus, eval_corpus, processing_class, callbacks, optimizers: see [`BlockTrainer`].

    Raises:
        ValueError: see [`BlockTrainer`]; a task needs blocks of its examples' length because no state is carried; or a
            stock model would carry its state with `gradient_checkpointing`.
    """

    method = "bptt"
    _final_state: RecurrentState | None = None  # of the last micro-batch

    def __init__(self, model: PreTrainedModel, *arguments, **options):
        super().__init__(with_state(model), *arguments, **options)

    def carries_state(self, model: PreTrainedModel, args: MultiStreamTrainingArguments) -> bool:
        carries = supports_recurrent_state(model) and args.regime == "multi_stream"
        if carries and isinstance(model, StockModelWithState) and args.gradient_checkpointing:
            raise ValueError(CHECKPOINTING_ERROR)
        return carries

    def build_carried(self) -> CarriedState:
        return CarriedState(self.model.init_state, self.args.device)

    def learn_block(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        """Run one micro-batch from the carried state of its group of streams, then carry the final state."""
        if self.carried is None:
            return super().learn_block(model, inputs, num_items_in_batch)
        group = int(inputs["stream_indices"][0])
        state = self.carried.get(group, len(inputs["stream_indices"]))
        loss = super().learn_block(model, inputs | {"state": state}, num_items_in_batch)
        self.carried.set(group, self._final_state)
        self._final_state = None
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Nats of a micro-batch / targets of the optimizer step; keeps the final state, detached."""
        carries = self.carried is not None
        loss, outputs = next_token_loss(model, self.model, inputs, num_items_in_batch, returns_state=carries)
        if carries:
            self._final_state = detach_state(outputs.state)
        if model.training:
            self.count_training(outputs.logits, inputs["shift_labels"])
        # DDP averages the gradients, but each loss is already divided by the targets of all processes.
        loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss
