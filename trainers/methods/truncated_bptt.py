"""Truncated backpropagation through time, on blocks and on windows that overlap (Memora, section 3)."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_backbone import RecurrentModel
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, supports_recurrent_state, upcast
from hf_recurrent.modeling.step.captured_block import CapturedTraining
from hf_recurrent.stock_models.stock_model import StockModelWithState
from hf_recurrent.trainers.methods.training_method import TrainingMethod


def next_token_loss(
    model: nn.Module, plain_model: nn.Module, batch: dict[str, Any], state: RecurrentState | None
) -> tuple[torch.Tensor, Any]:
    """Return the nats of a block / targets of the optimizer step, and the model's output.

    Args:
        model: the model, possibly wrapped for several processes.
        plain_model: the same model without the wrapper.
        batch: `input_ids`, `shift_labels`, `reset_mask` (B, T); `num_targets`, the targets of the optimizer step over
            all micro-batches and processes; perhaps `target_weights` (B, T), for a model with a count memory.
        state: the state before the block; None if none is carried, and the output has none then.
    """
    carries = state is not None
    inputs = {name: batch[name] for name in ("input_ids", "shift_labels", "reset_mask")}
    # Without a state, a stock model runs its own code, and its kernels.
    runs_stock_code = isinstance(plain_model, StockModelWithState) and not carries
    if supports_recurrent_state(plain_model) and not runs_stock_code:
        given = inputs | ({"state": state} if carries else {})
        if "target_weights" in batch:
            given["target_weights"] = batch["target_weights"]
        outputs = model(**given, use_cache=carries, num_items_in_batch=batch["num_targets"])
        return outputs.loss, outputs
    outputs = model(input_ids=inputs["input_ids"], use_cache=False)
    logits = upcast(outputs.logits.flatten(0, 1))
    nats = F.cross_entropy(logits, inputs["shift_labels"].flatten(), reduction="sum")
    return nats / batch["num_targets"], outputs


# Parts of a batch that a window keeps of its last T - S steps, by their names in the carried tensors.
_KEPT = {"window.input_ids": "input_ids", "window.shift_labels": "shift_labels", "window.reset_mask": "reset_mask"}


class TruncatedBptt(TrainingMethod):
    """Next-token loss of a block, with the state carried; gradients reach back to the beginning of the block."""

    name = "bptt"
    captured: CapturedTraining | None = None  # of the layers, where they can be CUDA graphs

    def start(self, sharding):
        super().start(sharding)
        backbone = getattr(self.model, "model", None)
        if self.args.cuda_graphs and isinstance(backbone, RecurrentModel) and not sharding.is_sharded:
            self.captured = CapturedTraining(backbone)

    def loss(self, model: nn.Module, batch: dict, carried: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """Nats of the block / targets of the optimizer step, and the state after the block."""
        with nullcontext() if self.captured is None else self.captured.active():
            loss, outputs = next_token_loss(model, self.model, batch, carried if self.carries_state else None)
        self.count_answers(outputs.logits, batch["shift_labels"])
        return loss, outputs.state if self.carries_state else {}

    def finish(self):
        if self.captured is not None:
            self.captured.clear()


class RollingWindowBptt(TruncatedBptt):
    """[`TruncatedBptt`] on the last T bytes of each stream, of which the block has S.

    Streams carry the state before their window, and what it keeps of the blocks before.
    """

    name = "bptt_rolling_window"

    def setup(self, model, args, train_corpus):
        trained = super().setup(model, args, train_corpus)
        if not self.carries_state:
            raise ValueError(f"`model` is a {type(model).__name__}, which has no state; windows overlap by states.")
        return trained

    def zero(self, batch_size: int, device: torch.device | str) -> RecurrentState:
        """Zero states, and windows without targets; the first byte of a stream begins an episode."""
        shape = (batch_size, self.args.window - self.args.block_size)
        return self.model.init_state(batch_size, device) | {
            "window.input_ids": torch.zeros(shape, dtype=torch.long, device=device),
            "window.shift_labels": torch.full(shape, IGNORE_INDEX, dtype=torch.long, device=device),
            "window.reset_mask": torch.zeros(shape, dtype=torch.bool, device=device),
        }

    def loss(self, model: nn.Module, batch: dict, carried: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """Loss of the window (B, T) that ends with the block (B, S), and what the next window starts from."""
        size = self.args.block_size
        state = {name: value for name, value in carried.items() if name not in _KEPT}
        window = {name: torch.cat([carried[kept], batch[name]], dim=1) for kept, name in _KEPT.items()}
        with torch.no_grad():
            first = {name: window[name][:, :size] for name in ("input_ids", "reset_mask")}
            after = model(**first, state=state, use_cache=True).state
        # The loss is a mean over T bytes of each stream; only S of them have been counted.
        window["num_targets"] = batch["num_targets"] * (self.args.window // size)
        loss, _ = super().loss(model, batch | window, state)
        return loss, after | {kept: window[name][:, size:] for kept, name in _KEPT.items()}
